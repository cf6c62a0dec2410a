"""Tensors that stay on a GPU, simulated by memory of the host: which are bound in place, copied, and kept alive."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headrace import Device, StackedTensors, dtypes, on_host
from headrace_engines import CudaLibrary
from headrace_onnx import OnnxRuntime
from headrace_onnx.device_binding import OrtTensor
from headrace_onnx.instance import DeviceInstance
from headrace_testing import BackendConformance, Example
from headrace_testing.played_tensors import PlayedDeviceTensor
from headrace_testing.serving import serve

X = np.arange(8, dtype=np.float32).reshape(2, 4)


class PlayedLibrary(CudaLibrary):
    """A device with the memory of the host. Records each copy and each wait for a stream."""

    kind = 1  # of the host, in DLPack's numbers

    def __init__(self) -> None:
        self.done: list[str] = []

    def use(self, device: int) -> None:
        assert device == 0

    @contextmanager
    def using(self, device: int) -> Iterator[None]:
        assert device == 0
        yield

    def new_stream(self) -> int:
        return 7

    def end_stream(self, stream: int) -> None:
        self.done.append("end")

    def queue_copy(self, target: int, source: int, size: int, stream: int) -> None:
        assert stream == 7
        self.done.append("DtoD")
        ctypes.memmove(target, source, size)

    def queue_write(self, address: int, source: int, size: int, stream: int) -> None:
        assert stream == 7
        self.done.append("HtoD")
        ctypes.memmove(address, source, size)

    def read(self, target: int, address: int, size: int) -> None:
        self.done.append("DtoH")
        ctypes.memmove(target, address, size)

    def finish(self, stream: int) -> None:
        self.done.append("finish")


class InPlace(PlayedDeviceTensor):
    """A tensor that is read in place, by DLPack, on the reader's stream."""

    streams: list[int | None]

    def __init__(self, array: Any, copies: list[tuple[int, ...]] | None = None) -> None:
        super().__init__(array, copies)
        self.streams = []

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        self.streams.append(stream)
        return self.memory.__dlpack__(**options)


class Elsewhere(PlayedDeviceTensor):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 5


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> PlayedLibrary:
    """Lets models with KIND_GPU run on the CPU, as on a device."""
    library = PlayedLibrary()
    monkeypatch.setattr("headrace_engines.cuda_library", lambda: library)
    monkeypatch.setattr("headrace_onnx.providers.device_of", lambda engine, model: Device("gpu", 0))
    monkeypatch.setattr("headrace_onnx.providers.choose", lambda *arguments: [("CPUExecutionProvider", {})])
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: None)
    return library


def load(graphs: Any, path: Path, config: str = "") -> Any:
    backend = OnnxRuntime({})
    model = graphs.model(path, config, device=Device("gpu", 0), instance_name="m_0")
    backend.complete_config(model)
    return backend.load(replace(model, shared=backend.share(model)))


def doubled(graphs: Any, name: str = "m") -> Path:
    """``y`` is ``x + x``, for f32[n, 4]."""
    io = (TensorProto.FLOAT, ["n", 4])
    path: Path = graphs.write([helper.make_node("Add", ["x", "x"], ["y"])], {"x": io}, {"y": io}, name=name)
    return path


def test_a_tensor_is_read_in_place_and_its_result_stays(graphs: Any, library: PlayedLibrary) -> None:
    instance = load(graphs, doubled(graphs))
    assert isinstance(instance, DeviceInstance)
    assert instance.takes_device_tensors
    assert not instance.any_thread
    tensor: Any = InPlace(X.copy())
    result: Any = instance.execute({"x": tensor})["y"]
    assert type(result) is OrtTensor
    assert (result.shape, result.dtype, tensor.streams, library.done) == ((2, 4), X.dtype, [7], ["finish"])
    passed: Any = result
    again: Any = instance.execute({"x": passed})["y"]
    assert library.done == ["finish"] * 2
    np.testing.assert_array_equal(result.to_host(), X * 2)
    np.testing.assert_array_equal(again[1:].to_host(), X[1:] * 4)
    assert (library.done, tensor.copies) == (["finish"] * 2 + ["DtoH"] * 2, [])
    assert result.to_host().flags.writeable
    instance.close()
    np.testing.assert_array_equal(again.to_host(), X * 4)
    assert library.done[-2:] == ["end", "DtoH"]


def test_results_are_arrays_if_the_caller_takes_no_device_tensors(graphs: Any, library: PlayedLibrary) -> None:
    instance = load(graphs, doubled(graphs))
    instance.wants_device_tensors = False
    found: Any = instance.execute({"x": StackedTensors([X, X])})["y"]
    assert (type(found), library.done) == (np.ndarray, [])
    np.testing.assert_array_equal(found, np.concatenate([X, X]) * 2)
    instance = load(graphs, graphs.identity(TensorProto.BFLOAT16, ["n"]))
    instance.wants_device_tensors = False
    assert isinstance(instance.execute({"x": np.zeros(2, dtypes.BF16.numpy)})["y"], OrtTensor)


def test_a_kept_result_survives_the_next_executions(graphs: Any, library: PlayedLibrary) -> None:
    instance = load(graphs, doubled(graphs))
    results = [instance.execute({"x": X + number})["y"] for number in range(3)]
    for number, each in enumerate(results):
        np.testing.assert_array_equal(each.to_host(), (X + number) * 2)


def test_rows_are_stacked_on_the_device(graphs: Any, library: PlayedLibrary) -> None:
    instance = load(graphs, doubled(graphs))
    tensor = StackedTensors([InPlace(X.copy()), X + 1, Elsewhere(X + 2)])
    found: Any = instance.execute({"x": tensor})["y"]
    assert library.done == ["DtoD", "HtoD", "HtoD", "finish"]
    np.testing.assert_array_equal(found.to_host(), np.concatenate([X, X + 1, X + 2]) * 2)
    library.done.clear()
    found = instance.execute({"x": StackedTensors([X, X + 1])})["y"]
    np.testing.assert_array_equal(found.to_host(), np.concatenate([X, X + 1]) * 2)
    assert library.done == ["DtoH"], "the engine copies small arrays itself"
    library.done.clear()
    large = np.arange(1 << 16, dtype=np.float32).reshape(-1, 4)
    found = instance.execute({"x": StackedTensors([large, large + 1])})["y"]
    np.testing.assert_array_equal(found.to_host(), np.concatenate([large, large + 1]) * 2)
    assert library.done == ["HtoD", "HtoD", "finish", "DtoH"]
    library.done.clear()
    large = np.arange(1 << 18, dtype=np.float32).reshape(-1, 4)
    for each in (large, Elsewhere(large)):
        np.testing.assert_array_equal(instance.execute({"x": each})["y"].to_host(), large * 2)
    assert library.done == ["HtoD", "finish", "DtoH"] * 2


def test_a_misaligned_tensor_is_copied(graphs: Any, library: PlayedLibrary) -> None:
    instance = load(graphs, doubled(graphs))
    memory = np.zeros(64, np.float32)
    begin = -(memory.ctypes.data // 4) % 4 + 1
    misaligned = memory[begin : begin + 8].reshape(2, 4)
    misaligned[:] = X
    np.testing.assert_array_equal(instance.execute({"x": InPlace(misaligned)})["y"].to_host(), X * 2)
    assert library.done == ["DtoD", "finish", "DtoH"]
    elsewhere, gaps = Elsewhere(X.copy()), InPlace(np.repeat(X, 2, axis=1)[:, ::2])
    for each in (elsewhere, gaps):
        library.done.clear()
        np.testing.assert_array_equal(instance.execute({"x": each})["y"].to_host(), X * 2)
        assert (library.done, each.copies) == (["DtoH"], [(2, 4)])
    empty = instance.execute({"x": InPlace(X[:0])})["y"]
    assert (type(empty), empty.shape) == (np.ndarray, (0, 4))


def test_an_input_that_is_an_output_keeps_its_memory(graphs: Any, library: PlayedLibrary) -> None:
    io = (TensorProto.FLOAT, ["n", 4])
    path = graphs.write([helper.make_node("Add", ["x", "x"], ["y"])], {"x": io}, {"y": io, "x": io})
    memory = X.copy()
    reference = weakref.ref(memory)
    result: Any = load(graphs, path).execute({"x": InPlace(memory)})
    address = memory.ctypes.data
    del memory
    assert result["x"]._memory.address(0) == address, "the engine shares the memory of such an input"
    assert reference() is not None
    np.testing.assert_array_equal(result["x"].to_host(), X)
    del result
    assert reference() is None


@pytest.mark.parametrize("kind", [each for each in dtypes.ALL if each is not dtypes.BYTES])
def test_every_type_survives_a_round_trip(graphs: Any, library: PlayedLibrary, kind: Any) -> None:
    names = {"FP16": "FLOAT16", "FP32": "FLOAT", "FP64": "DOUBLE", "BF16": "BFLOAT16"}
    element = getattr(TensorProto, names.get(kind.name, kind.name))
    instance = load(graphs, graphs.identity(element, ["n"]))
    x = np.array([0, 1, 1, 0]).astype(kind.numpy)
    result = instance.execute({"x": x})["y"]
    assert result.dtype == kind.numpy
    again = instance.execute({"x": StackedTensors([result[2:], x])})["y"]
    np.testing.assert_array_equal(again.to_host().view(np.uint8), np.concatenate([x[2:], x]).view(np.uint8))


def test_scalars_have_the_dims_of_the_config(graphs: Any, library: PlayedLibrary) -> None:
    io: Any = (TensorProto.FLOAT, [])
    path = graphs.write([helper.make_node("Add", ["x", "x"], ["y"])], {"x": io}, {"y": io})
    instance = load(graphs, path)
    result = instance.execute({"x": np.array([3], np.float32)})["y"]
    again = instance.execute({"x": result})["y"]
    assert (result.shape, again.to_host().tolist()) == ((1,), [12])


def test_strings_stay_on_the_host(graphs: Any, library: PlayedLibrary) -> None:
    from headrace import BytesTensor

    instance = load(graphs, graphs.identity(TensorProto.STRING, ["n"]))
    assert not instance.any_thread
    assert not instance.takes_device_tensors
    assert instance.execute({"x": BytesTensor.from_items([b"a"], [1])})["y"].tolist() == ["a"]


def test_a_failed_run_names_the_engine_and_the_next_one_works(graphs: Any, library: PlayedLibrary) -> None:
    instance = load(graphs, doubled(graphs))
    with pytest.raises(Exception, match="onnx runtime error"):
        instance.execute({"x": InPlace(np.zeros((2, 5), np.float32))})
    np.testing.assert_array_equal(on_host(instance.execute({"x": X})["y"]), X * 2)


class Kit(BackendConformance):
    """For the check that runs below; pytest does not collect it."""

    plugin, backend, heavy = "headrace_onnx", "onnxruntime", ("onnxruntime", "onnx")


def test_the_kit_accepts_it(graphs: Any, library: PlayedLibrary) -> None:
    example = Example(doubled(graphs), {"x": X}, {"y": X * 2})
    Kit().test_tensors_on_a_device_are_read_like_arrays(example)


def test_models_of_an_ensemble_pass_tensors_on(graphs: Any, library: PlayedLibrary) -> None:
    for name in ("one", "two"):
        config = 'backend: "onnxruntime" instance_group { kind: KIND_CPU }'
        (doubled(graphs, name).parent / "config.pbtxt").write_text(config)
    steps = " ".join(
        f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "x" value: "{x}" }} '
        f'output_map {{ key: "y" value: "{y}" }} }}'
        for name, x, y in (("one", "a", "t"), ("two", "t", "b"))
    )
    io = "data_type: TYPE_FP32 dims: [4]"
    (graphs.root / "chain" / "1").mkdir(parents=True)
    (graphs.root / "chain" / "config.pbtxt").write_text(
        f'platform: "ensemble" max_batch_size: 4 input {{ name: "a" {io} }} output {{ name: "b" {io} }} '
        f"ensemble_scheduling {{ step [ {steps.replace('} {', '}, {')} ] }}"
    )
    with serve(graphs.root) as server:
        library.done.clear()
        np.testing.assert_array_equal(np.asarray(server.infer("chain", {"a": X}).outputs["b"]), X * 4)
        assert library.done == ["finish"], "the engine itself copies the output"
