"""Modules in a ``model.py`` behind a server: by the stock client, in threads and processes, reloaded, and at fault."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import HeadraceError, Server
from headrace_testing.serving import WAYS, Way, infer, on_loop, serve
from tests.backends.torch.conftest import SCALE, SCALES

X = 'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [4] } '
Y = 'output { name: "y" data_type: TYPE_FP32 dims: [4] } '
ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)


def parameter(key: str, value: str) -> str:
    return f"parameters {{ key: \"{key}\" value {{ string_value: '{value}' }} }} "


@pytest.fixture
def write_scale(modules: Any) -> Callable[..., Path]:
    """Writes a model that multiplies with `SCALES`, which are its weights."""

    def write(name: str, config: str = "") -> Path:
        folder: Path = modules.write(SCALE, name, f"{X} {Y} {config}")
        torch.save({"scale": torch.from_numpy(SCALES)}, folder / "model.pt")
        return folder

    return write


@pytest.mark.parametrize("over", WAYS)
def test_a_model_is_served_over_every_protocol(modules: Any, write_scale: Callable[..., Path], over: Way) -> None:
    write_scale("m")
    with serve(modules.root, listen=True) as server:
        np.testing.assert_array_equal(infer(server, "m", {"x": ROWS}, over)["y"], ROWS * SCALES)


@pytest.mark.parametrize(
    ("isolation", "compiled", "count"),
    [("process", "", 2), ("thread", "", 2), ("process", '{"backend": "aot_eager"}', 1)],
)
def test_a_model_is_served_and_reloaded_with_each_isolation(
    modules: Any, write_scale: Callable[..., Path], isolation: str, compiled: str, count: int
) -> None:
    config = parameter("isolation", isolation) + f"instance_group {{ kind: KIND_CPU count: {count} }}"
    config += parameter("TORCH_COMPILE_OPTIONAL_PARAMETERS", compiled) if compiled else ""
    folder = write_scale("m", config)
    with serve(modules.root, model_control_mode="explicit", load_model=("*",)) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": ROWS}).outputs["y"], ROWS * SCALES)
        (folder / "model.py").write_text("import torch\n" + SCALE.replace("x * self.scale", "x + self.scale"))
        on_loop(server, server.load("m"))
        np.testing.assert_array_equal(server.infer("m", {"x": ROWS}).outputs["y"], ROWS + SCALES)
        on_loop(server, server.unload("m"))
    assert sorted(path.name for path in folder.iterdir()) == ["model.pt", "model.py"]


def test_requests_are_batched_and_only_the_culprit_fails(modules: Any) -> None:
    code = """
    class Net(torch.nn.Module):
        def forward(self, x):
            if (x < 0).any():
                raise ValueError("less than nothing")
            return x + 100 * len(x)
    """
    batching = "dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 500000 } "
    modules.write(code, "m", X + Y + batching)
    rows = [ROWS[:1], -1 - ROWS[:1], ROWS[1:2]]
    with serve(modules.root) as server:

        async def ask() -> list[Any]:
            answers = [server.infer_async("m", {"x": each}) for each in rows]
            return await asyncio.gather(*answers, return_exceptions=True)

        fine, failed, also = on_loop(server, ask())
        np.testing.assert_array_equal(fine.outputs["y"], ROWS[:1] + 100)  # run again, alone
        np.testing.assert_array_equal(also.outputs["y"], ROWS[1:2] + 100)
        assert "PyTorch execute failure: ValueError: less than nothing (model.py, line 6, in forward)" in str(failed)
        both = [ROWS[:1], ROWS[1:2], ROWS[2:]]
        rows[:] = both
        np.testing.assert_array_equal(
            np.concatenate([each.outputs["y"] for each in on_loop(server, ask())]), ROWS + 300
        )


def reasons(server: Server) -> dict[str, str]:
    return {entry.name: entry.reason for entry in server.index()}


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_failing_model_affects_no_other(modules: Any, write_scale: Callable[..., Path], isolation: str) -> None:
    where = parameter("isolation", isolation)
    write_scale("sound")
    initial = "class Net(torch.nn.Module):\n    def __init__(self):\n        {}\n"
    modules.write(initial.format("raise ValueError('no weights today')"), "raises", X + Y + where)
    modules.write(initial.format("raise SystemExit(3)"), "exits", X + Y + where)
    modules.write("x = (", "misspelt", X + Y + where)
    evil = write_scale("evil", where)
    torch.save({"scale": logging.getLogger()}, evil / "model.pt")
    with serve(modules.root, exit_on_error=False) as server:
        found = reasons(server)
        assert "ValueError: no weights today (model.py, line 4, in __init__)" in found["raises"]
        assert "SystemExit: 3" in found["exits"]
        assert "SyntaxError" in found["misspelt"]
        assert "names 'logging.getLogger', which could run code" in found["evil"]
        np.testing.assert_array_equal(server.infer("sound", {"x": ROWS}).outputs["y"], ROWS * SCALES)


def test_a_model_that_forks_and_prints_in_a_process_is_served(modules: Any) -> None:
    code = """
    import os

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.child = os.fork()
            if not self.child:
                os.execvp("sleep", ["sleep", "60"])
            print("made", flush=True)

        def forward(self, x):
            print("called")
            return x + 0 * self.child
    """
    modules.write(code, "m", X + Y + parameter("isolation", "process"))
    with serve(modules.root) as server:
        np.testing.assert_array_equal(server.infer("m", {"x": ROWS}).outputs["y"], ROWS)


def test_a_sent_config_may_not_name_files_elsewhere_or_set_trust(
    modules: Any, write_scale: Callable[..., Path]
) -> None:
    folder = write_scale("m")
    torch.save({"scale": logging.getLogger()}, folder / "model.pt")
    (modules.root / "other.py").write_text("raise SystemExit")
    tensor = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
    config = {"backend": "pytorch", "runtime": "model.py", "input": [tensor], "output": [{**tensor, "name": "y"}]}
    with serve(modules.root, model_control_mode="explicit", exit_on_error=False) as server:
        for more, problem in (
            (
                {"default_model_filename": "../../other.py"},
                "outside the model directory|must not|default_model_filename",
            ),
            ({"parameters": {"trust": {"string_value": "true"}}}, "'trust' of model 'm' came with a load request"),
        ):
            with pytest.raises(HeadraceError, match=problem):
                on_loop(server, server.load("m", {"config": json.dumps(config | more)}))
