"""A replica without Ray. tests/ray has a cluster."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from headrace import Code, ConfigError, HeadraceError, NotFound, ServerOptions, Unavailable
from headrace_cli import main
from headrace_ray import Replica, deployment
from headrace_testing import CommandConformance

CONFIG = """
backend: "identity"
input [ { name: "x" data_type: TYPE_FP32 dims: [2] }, { name: "s" data_type: TYPE_STRING dims: [-1] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [2] }, { name: "t" data_type: TYPE_STRING dims: [-1] } ]
"""
INPUTS: dict[str, Any] = {"x": np.array([1, 2], np.float32), "s": [b"a", b"\xff"]}


class TestRayCommand(CommandConformance):
    plugin, command = "headrace_ray", "ray"
    bad = ("--model-repository=models", "--models-per-replica=2", "--", "--model-control-mode=poll")


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "refused"),
        ("127.0.0.1:99999", "127.0.0.1:99999': "),
        ("nowhere.invalid:6379", "nowhere.invalid:6379': "),
        ("ray://127.0.0.1:1", "refused"),
        ("local", "ends with this command"),
    ],
)
def test_a_wrong_address_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], address: str, why: str
) -> None:
    monkeypatch.setattr("headrace_ray.serve_application.deployment", lambda *_, **__: None)  # it would import Ray
    assert main(["ray", "--model-repository=models", f"--address={address}"]) == 1
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"cannot reach the Ray cluster '{address}': ")
    assert why in stderr
    assert len(stderr.splitlines()) == 1


class Loading(Replica):
    """A replica that records the models that it should load."""

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self.used: list[str] = []

    async def use(self, model: str) -> None:
        self.used.append(model)


def with_replica(folder: Path, check: Callable[[Loading], Awaitable[None]]) -> None:
    (folder / "identity/1").mkdir(parents=True)
    (folder / "identity/config.pbtxt").write_text(CONFIG)

    async def run() -> None:
        replica = Loading(ServerOptions(model_repository=(str(folder),)))
        await replica.start()
        try:
            await check(replica)
        finally:
            await replica.stop()
        with pytest.raises(Unavailable, match="the server is not ready"):
            await replica.check_health()

    asyncio.run(run())


def test_a_replica_answers_calls_and_paths(tmp_path: Path) -> None:
    async def check(replica: Loading) -> None:
        await replica.check_health()
        assert replica.record_autoscaling_stats() == {"headrace_pending": 0}
        streamed = [each async for each in replica.stream("identity", INPUTS)]
        for found in (await replica.infer("identity", INPUTS), *streamed):
            np.testing.assert_array_equal(found["y"], INPUTS["x"])
            assert found["t"].tolist() == INPUTS["s"]
        assert len(streamed) == 1
        with pytest.raises(NotFound) as refused:
            await replica.infer("nothing", {})
        copied = pickle.loads(pickle.dumps(refused.value))  # as Ray brings it to its caller
        assert (type(copied), copied.message, copied.code) == (NotFound, refused.value.message, Code.NOT_FOUND)
        replica.used.clear()
        transport = httpx.ASGITransport(replica.app(), root_path="/a")
        async with httpx.AsyncClient(transport=transport, base_url="http://ray/a") as client:
            assert (await client.get("/v2/health/ready")).status_code == 200
            assert (await client.get("/v2/models/stats")).status_code == 200
            assert (await client.get("/v2/models/identity")).json()["name"] == "identity"
            assert (await client.get("/v2/models/nothing/ready")).status_code == 404
        assert replica.used == ["identity", "nothing"]

    with_replica(tmp_path, check)


@pytest.mark.parametrize(
    ("options", "models", "why"),
    [
        ({"workers": 2}, 0, "--workers=2 is refused in a replica"),
        ({}, 2, "models_per_replica=2 needs --model-control-mode=explicit, not 'none'"),
        ({}, -1, "models_per_replica is -1"),
    ],
)
def test_flags_that_a_replica_cannot_have_are_refused(options: dict[str, Any], models: int, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        deployment(ServerOptions(model_repository=("m",), **options), models_per_replica=models)
    assert isinstance(refused.value, HeadraceError)
