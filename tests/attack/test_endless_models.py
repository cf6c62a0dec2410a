"""Models that never finish a load or a request: no other model waits for them, and the server can stop."""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.http
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace

TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [3] } output { name: "y" data_type: TYPE_FP32 dims: [3] }
instance_group { kind: KIND_CPU count: 1 }
"""
HANGS = """
import time

class TritonPythonModel:
    def initialize(self, args):
        while True:
            time.sleep(1)
"""


def write(model: Path, config: str) -> Path:
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(config + TENSORS)
    return model / "1"


def parameter(key: str, value: str) -> str:
    return f' parameters {{ key: "{key}" value {{ string_value: "{value}" }} }} '


@pytest.mark.usefixtures("of_its_own")
def test_loads_that_never_end_stop_nobody(
    serve_models: Callable[..., Headrace], tmp_path: Path, under_attack: Callable[..., AbstractContextManager[None]]
) -> None:
    bounds = parameter("isolation", "thread") + parameter("load_timeout_seconds", "1")
    (write(tmp_path / "m", 'backend: "python"' + bounds) / "model.py").write_text(HANGS)
    server = serve_models(tmp_path, "--model-load-thread-count=1")
    with (
        under_attack(server),
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=20.0) as client,
    ):
        for _ in range(3):
            with pytest.raises(InferenceServerException, match="model 'm' did not load within 1 s"):
                client.load_model("m")
        with pytest.raises(InferenceServerException, match="3 threads of earlier loads have not ended"):
            client.load_model("m")
        client.load_model("huge")
        states = {line["name"]: line.get("state") for line in client.get_model_repository_index()}
        assert (states["echo"], states["huge"], states["m"]) == ("READY", "READY", "UNAVAILABLE")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 0


@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.usefixtures("of_its_own")
def test_an_execution_that_never_ends_stops_nobody(
    serve_models: Callable[..., Headrace],
    tmp_path: Path,
    under_attack: Callable[..., AbstractContextManager[None]],
    wait_until: Callable[..., None],
) -> None:
    """TorchScript cannot be interrupted: the unload says so, and the server ends as Triton does, with exit code 1."""
    import torch

    class Endless(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            while bool(x.numel() > 0):
                x = x + 1
            return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(Endless())
    script.save(str(write(tmp_path / "m", 'backend: "pytorch"') / "model.pt"))  # type: ignore[no-untyped-call]
    server = serve_models(tmp_path, "--exit-timeout-secs=1")
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=100.0) as client:
        client.load_model("m")
        with under_attack(server, kept_bytes=64 << 20):
            given = tritonclient.http.InferInput("x", [3], "FP32")
            given.set_data_from_numpy(np.zeros(3, np.float32))
            with (
                tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=0.3) as impatient,
                pytest.raises(TimeoutError),
            ):
                impatient.infer("m", [given])
            client.unload_model("m")
        # It is said after 10 s, for most of which the thread need not spin.
        server.process.send_signal(signal.SIGSTOP)
        goes_on_at = time.monotonic() + 9.5
        wait_until(lambda: time.monotonic() > goes_on_at, "9.5 s have passed")
        server.process.send_signal(signal.SIGCONT)

        def index() -> str:
            return next(json.dumps(line) for line in client.get_model_repository_index() if line["name"] == "m")

        wait_until(lambda: "executes on a thread of the server, which cannot be ended" in index(), "it is said", 30.0)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(20) == 1
