"""Concurrent instances, in threads and processes, return right results to all kinds of requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openvino
import pytest
from openvino import opset13

from headrace_testing.serving import infer, serve

COLUMNS = 64
CALLERS, REQUESTS = 8, 25


@pytest.fixture
def weights() -> np.ndarray[Any, Any]:
    return np.random.default_rng(5).normal(size=(COLUMNS, COLUMNS)).astype(np.float32)


def write(models: Any, weights: np.ndarray[Any, Any], config: str) -> None:
    """``y = tanh(x @ weights)``."""
    models.save(
        lambda x: {"y": opset13.tanh(opset13.matmul(x, opset13.constant(weights), False, False))},
        {"x": (openvino.Type.f32, [-1, COLUMNS])},
    )
    models.config(config)


def settings(count: int, batching: str = "", **parameters: str) -> str:
    texts = " ".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
    )
    return f"max_batch_size: 8 instance_group {{ count: {count} kind: KIND_CPU }} {batching} {texts}"


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("streams", [{}, {"NUM_STREAMS": "2"}], ids=["", "two streams"])
@pytest.mark.parametrize("batching", ["", "dynamic_batching { max_queue_delay_microseconds: 500 }"])
def test_every_caller_gets_the_answer_to_its_own_rows(
    models: Any, weights: np.ndarray[Any, Any], count: int, isolation: str, streams: dict[str, str], batching: str
) -> None:
    write(models, weights, settings(count, batching, isolation=isolation, **streams))
    with serve(models.root) as server:

        def call(number: int) -> None:
            rng = np.random.default_rng(number)
            for _ in range(REQUESTS):
                x = rng.normal(size=(int(rng.integers(1, 5)), COLUMNS)).astype(np.float32)
                y = server.infer("m", {"x": x}).outputs["y"]
                np.testing.assert_allclose(y, np.tanh(x @ weights), rtol=1e-4, atol=1e-5)

        with ThreadPoolExecutor(CALLERS) as pool:
            list(pool.map(call, range(CALLERS)))


@pytest.mark.parametrize("parameters", [{"NUM_STREAMS": "AUTO"}, {"NUM_STREAMS": "NUMA"}, {"NUM_STREAMS": "1"},
    {"PERFORMANCE_HINT": "LATENCY"}, {"PERFORMANCE_HINT": "THROUGHPUT"}, {"INFERENCE_NUM_THREADS": "1"}])  # fmt: skip
def test_results_are_right_for_all_streams(
    models: Any, weights: np.ndarray[Any, Any], parameters: dict[str, str]
) -> None:
    write(models, weights, settings(2, **parameters))
    arrays = np.random.default_rng(1).normal(size=(40, 3, COLUMNS)).astype(np.float32)
    with serve(models.root) as server, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: server.infer("m", {"x": x}).outputs["y"], arrays))
    for x, y in zip(arrays, found, strict=True):
        np.testing.assert_allclose(y, np.tanh(x @ weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_is_served_in_threads_and_processes(models: Any, weights: np.ndarray[Any, Any], isolation: str) -> None:
    write(models, weights, settings(1, isolation=isolation))
    x = np.random.default_rng(2).normal(size=(3, COLUMNS)).astype(np.float32)
    with serve(models.root, listen=True) as server:
        for over in ("http-json", "http-binary", "grpc"):
            y = infer(server, "m", {"x": x}, over)["y"]
            np.testing.assert_allclose(y, np.tanh(x @ weights), rtol=1e-4, atol=1e-5)
