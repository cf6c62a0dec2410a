"""Requests of hundreds of megabytes to models in processes: what they took comes back, in the server and there."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest
import tritonclient.http

from tests.attack.conftest import KEPT, KEPT_BYTES, PATIENCE_MS, RELEASE_S

if TYPE_CHECKING:
    from tests.conftest import Headrace

TENSORS = """
input { name: "x" data_type: TYPE_UINT8 dims: [-1] } output { name: "y" data_type: TYPE_UINT8 dims: [-1] }
instance_group { kind: KIND_CPU } parameters { key: "isolation" value { string_value: "process" } }
"""
MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in arrays]
"""


def resident(server: Headrace) -> dict[int, int]:
    """Bytes of the server and of each of its processes."""
    parent = psutil.Process(server.process.pid)
    return {each.pid: each.memory_info().rss for each in (parent, *parent.children(recursive=True))}


@pytest.mark.usefixtures("of_its_own")
@pytest.mark.parametrize("backend", ["identity", "python"])
def test_large_requests_to_a_process_leave_nothing(
    backend: str,
    serve_models: Callable[..., Headrace],
    tmp_path: Path,
    under_attack: Callable[..., AbstractContextManager[None]],
    wait_until: Callable[..., None],
    is_judged: bool,
) -> None:
    """300 MiB is more than an arena has, and travels in the message; 200 MiB is in the arena."""
    if backend == "identity" and not is_judged:
        pytest.skip("a plain run has the backend whose process holds the most of a request")
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(f'backend: "{backend}" {TENSORS}')
    if backend == "python":
        (version / "model.py").write_text(MODEL)
    server = serve_models(tmp_path, f"--http-max-input-size={1 << 30}")
    with tritonclient.http.InferenceServerClient(
        f"127.0.0.1:{server.http}", network_timeout=100.0, connection_timeout=100.0
    ) as client:

        def ask(size: int) -> None:
            given = tritonclient.http.InferInput("x", [size], "UINT8")
            given.set_data_from_numpy(np.ones(size, np.uint8))
            assert client.infer("m", [given]).as_numpy("y").size == size

        client.load_model("m")
        for _ in range(10):
            ask(100)
        before = resident(server)
        # The event loop copies a batch into the arena, or the message: others wait for hundreds of megabytes.
        with under_attack(server, PATIENCE_MS, kept_bytes=16 << 20):
            ask(200 << 20)
            ask(300 << 20)

    def is_released() -> bool:
        return all(rss <= before[pid] * KEPT + 4 * KEPT_BYTES for pid, rss in resident(server).items())

    wait_until(is_released, f"of {before} nothing is kept, as in {resident(server)}", 2 * RELEASE_S)
