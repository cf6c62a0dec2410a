"""TensorRT itself on a GPU: plans built on the spot, with arithmetic as the oracle. Never run so far.

``pytest -m "gpu and tensorrt" tests/backends/tensorrt``
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from google.protobuf import text_format

from headrace import Device, Instance, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_tensorrt import Parameters, TensorRT


def _missing() -> str:
    """Return the missing part of this machine; empty if there is none. The stand-in for the driver does not count."""
    try:
        if hasattr(ctypes.CDLL("libcuda.so.1"), "standin_launch"):
            return "the CUDA driver is a stand-in"
        importlib.import_module("tensorrt")
    except (ImportError, OSError) as error:
        return f"no TensorRT and GPU here: {error}"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.tensorrt]


@pytest.fixture(autouse=True, scope="module")
def _real() -> None:
    if reason := _missing():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def trt() -> Any:
    return importlib.import_module("tensorrt")


def build(trt: Any, path: Path, fill: Callable[[Any], None], profiles: Sequence[dict[str, Any]], *flags: str) -> Path:
    """Build what ``fill`` puts into a network, into ``path/m/1/model.plan``."""
    logger = trt.Logger(trt.Logger.WARNING)
    builder = trt.Builder(logger)
    network, config = builder.create_network(0), builder.create_builder_config()
    fill(network)
    for flag in flags:
        config.set_flag(getattr(trt.BuilderFlag, flag))
    for bounds in profiles:
        profile = builder.create_optimization_profile()
        for name, shapes in bounds.items():
            profile.set_shape(name, *shapes)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    directory = path / "m" / "1"
    directory.mkdir(parents=True)
    (directory / "model.plan").write_bytes(bytes(plan))
    return directory


def sum_and_difference(trt: Any) -> Callable[[Any], None]:
    def fill(network: Any) -> None:
        a, b = (network.add_input(name, trt.float32, (-1, 16)) for name in "AB")
        for name, operation in (("S", trt.ElementWiseOperation.SUM), ("D", trt.ElementWiseOperation.SUB)):
            result = network.add_elementwise(a, b, operation).get_output(0)
            result.name = name
            network.mark_output(result)

    return fill


BOTH = {name: [(1, 16), (4, 16), (8, 16)] for name in "AB"}


def serve(path: Path, config: str = "", parameters: Parameters | None = None) -> Instance:
    parsed = text_format.Parse(config, ModelConfig(name="m"))
    for index, group in enumerate(parsed.instance_group):
        group.name = f"m_{index}"
    for policy in (parsed.optimization.input_pinned_memory, parsed.optimization.output_pinned_memory):
        policy.enable = True
    chosen = parameters or Parameters()
    model = Model("m", 1, path, parsed, chosen, device=Device("gpu", 0), instance_name="m_0_0")
    backend = TensorRT({})
    backend.complete_config(model)
    instance = backend.load(replace(model, shared=backend.share(model)))
    assert isinstance(instance, Instance)
    instance.warm_up()
    return instance


def pair(rows: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    a, b = np.random.default_rng(rows).normal(size=(2, rows, 16)).astype(np.float32)
    return a, b


@pytest.mark.parametrize("config", ["", "optimization { cuda { graphs: true } }"])
def test_answers_on_the_gpu_are_those_of_arithmetic(trt: Any, tmp_path: Path, config: str) -> None:
    instance = serve(build(trt, tmp_path, sum_and_difference(trt), [BOTH]), config)
    results = []
    for rows in (1, 5, 8, 2, 2):
        a, b = pair(rows)
        outputs = instance.execute({"A": a, "B": b})
        results.append((outputs["S"], a + b))
        np.testing.assert_array_equal(outputs["D"], a - b)
    for found, expected in results:
        np.testing.assert_array_equal(found, expected)
    instance.close()


def test_a_lower_bound_runs_captured_executions_for_fewer_rows(trt: Any, tmp_path: Path) -> None:
    spec = "graph_spec { batch_size: 6 graph_lower_bound { batch_size: 3 } }"
    path = build(trt, tmp_path, sum_and_difference(trt), [BOTH])
    instance = serve(path, f"optimization {{ cuda {{ graphs: true {spec} }} }}")
    for rows in (3, 6, 2, 5):
        a, b = pair(rows)
        np.testing.assert_array_equal(instance.execute({"A": a, "B": b})["S"], a + b)


def test_two_profiles_and_two_threads(trt: Any, tmp_path: Path) -> None:
    small = {name: [(1, 16), (1, 16), (2, 16)] for name in "AB"}
    path = build(trt, tmp_path, sum_and_difference(trt), [small, BOTH])
    failures: list[str] = []

    def ask() -> None:
        instance = serve(path, 'instance_group { profile: [ "0", "1" ] }')
        for rows in (1, 8, 2, 7, 1) * 20:
            a, b = pair(rows)
            if not np.array_equal(instance.execute({"A": a, "B": b})["S"], a + b):
                failures.append(f"{rows} rows")
        instance.close()

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_an_output_may_be_as_large_as_its_data_say(trt: Any, tmp_path: Path) -> None:
    def fill(network: Any) -> None:
        found = network.add_non_zero(network.add_input("x", trt.float32, (6,)), trt.int64).get_output(0)
        found.name = "found"
        network.mark_output(found)

    instance = serve(build(trt, tmp_path, fill, []))
    for x in ([0, 1, 0, 0, 5, 6], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]):
        found = instance.execute({"x": np.array(x, np.float32)})["found"]
        assert np.asarray(found).ravel().tolist() == np.flatnonzero(np.array(x)).tolist()


def test_a_refittable_plan_takes_weights_of_a_file(trt: Any, tmp_path: Path) -> None:
    twos = np.full((1, 4), 2, np.float32)  # TensorRT keeps the address

    def fill(network: Any) -> None:
        x = network.add_input("x", trt.float32, (-1, 4))
        weights = trt.Weights(twos)
        constant = network.add_constant((1, 4), weights)
        network.set_weights_name(weights, "k")
        product = network.add_elementwise(x, constant.get_output(0), trt.ElementWiseOperation.PROD).get_output(0)
        product.name = "y"
        network.mark_output(product)

    path = build(trt, tmp_path, fill, [{"x": [(1, 4), (2, 4), (8, 4)]}], "REFIT")
    np.savez(path / "weights.npz", k=np.full((1, 4), 3, np.float32))
    x = np.ones((2, 4), np.float32)
    assert np.asarray(serve(path).execute({"x": x})["y"])[0, 0] == 2
    instance = serve(path, parameters=Parameters(refit_weights="weights.npz"))
    assert np.asarray(instance.execute({"x": x})["y"])[0, 0] == 3
