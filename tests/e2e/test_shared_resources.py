"""Models that share a resource, in a real server with the rate limiter, by the stock client."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: Returns the begin and the end of its execution. The clock is one for all processes of the machine.
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            began = time.monotonic_ns()
            time.sleep(0.02)
            span = np.array([[began, time.monotonic_ns()]], np.int64)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", span)]))
        return responses
"""
CONFIG = """
backend: "python" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [1] } output { name: "OUT" data_type: TYPE_INT64 dims: [2] }
"""
THREAD = 'parameters { key: "isolation" value { string_value: "thread" } }'
ENOUGH = 10


def group(units: int, resource: str = 'name: "device"') -> str:
    limiter = f"rate_limiter {{ resources {{ {resource} count: {units} }} }}" if units else ""
    return f"instance_group {{ kind: KIND_CPU {limiter} }}"


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace], add_model: Callable[..., Path]
) -> Headrace:
    repository = tmp_path_factory.mktemp("repository")
    for name, config in {
        "process": group(2),
        "thread": group(1) + THREAD,
        "free": group(0),
        "greedy": group(3),
        "global": group(1, 'name: "device" global: true'),
    }.items():
        (add_model(repository, name, CONFIG + config) / "model.py").write_text(MODEL)
    return keep_serving(
        f"--model-repository={repository}", "--model-control-mode=explicit", "--rate-limit=execution_count",
        "--rate-limit-resource=device:2", *(f"--load-model={name}" for name in ("process", "thread", "free")),
    )  # fmt: skip


def spans(client: Any, name: str) -> list[tuple[int, int]]:
    tensor = triton.InferInput("IN", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    found = []
    for _ in range(ENOUGH):
        began, ended = client.infer(name, [tensor]).as_numpy("OUT")[0].tolist()
        found.append((began, ended))
    return found


def overlap(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> int:
    return sum(a < d and c < b for a, b in some for c, d in others)


def test_models_that_share_a_resource_never_execute_at_the_same_time(server: Headrace) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client, ThreadPoolExecutor(3) as callers:
        names = ("process", "thread", "free")
        process, thread, free = callers.map(lambda name: spans(client, name), names)
    assert overlap(process, thread) == 0
    assert overlap(process + thread, free) > 0  # models that share nothing do not wait


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("greedy", 'Resource count for "device" is limited to 2 which will prevent scheduling of one or more model '
         "instances, the minimum required count is 3"),
        ("global", 'Resource "device" is present as both global and device-specific resource in the model '
         "configuration."),
    ],
)  # fmt: skip
def test_a_model_that_could_never_run_is_not_loaded_and_the_others_go_on(
    server: Headrace, name: str, text: str
) -> None:
    with triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        with pytest.raises(InferenceServerException) as refusal:
            client.load_model(name)
        assert text in refusal.value.message()
        assert len(spans(client, "process")) == ENOUGH
