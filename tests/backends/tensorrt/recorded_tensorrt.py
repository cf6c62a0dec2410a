"""A fake of the module ``tensorrt``, for machines without the real one. It says so by its name, and by its version.

It has the classes and methods that `headrace_tensorrt.tensorrt_api` lists, whose signatures are those of the real
bindings (test_tensorrt_api.py), follows the rules that their documentation states, and records every call in `CALLS`.
Its plans are JSON behind `MAGIC`: tensors, profiles, and what to compute with NumPy on "device" memory, when the stream
of the stand-in driver (standin_cuda.c) is waited for. How a real TensorRT behaves beyond what is documented it cannot
tell.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Sequence
from enum import Enum
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

__version__ = "11.4.0+recorded"
MAGIC = b"RECORDED PLAN\n"
#: What was called, in order: the class and method, and the arguments.
CALLS: list[tuple[str, tuple[Any, ...]]] = []
_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

DataType = Enum("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 BOOL UINT8 FP8 INT4 FP4 E8M0")
TensorIOMode = Enum("TensorIOMode", "NONE INPUT OUTPUT")
TensorLocation = Enum("TensorLocation", "DEVICE HOST")
TensorFormat = Enum("TensorFormat", "LINEAR CHW2 HWC8 CHW4 CHW16 CHW32 DHWC8 CDHW32 HWC DLA_LINEAR DLA_HWC4 HWC16 DHWC")
ExecutionContextAllocationStrategy = Enum("ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")
Severity = Enum("Severity", "INTERNAL_ERROR ERROR WARNING INFO VERBOSE")
_NUMPY: dict[str, Any] = {
    "FLOAT": np.float32, "HALF": np.float16, "BF16": ml_dtypes.bfloat16, "INT8": np.int8, "INT32": np.int32,
    "INT64": np.int64, "BOOL": np.bool_, "UINT8": np.uint8,
}  # fmt: skip
_VECTORS = {"CHW2": 2, "CHW4": 4, "CHW16": 16, "CHW32": 32, "HWC8": 8}


def _record(what: str, *arguments: Any) -> None:
    CALLS.append((what, arguments))


class ILogger:
    """To derive from; its ``__init__`` must be called."""

    def __init__(self) -> None:
        self.was_made = True

    def log(self, severity: Severity, msg: str) -> None:
        raise NotImplementedError


class IOutputAllocator:
    """To derive from; its ``__init__`` must be called."""

    def __init__(self) -> None:
        self.was_made = True


class Dims:
    """Like the real one: a sequence by length and index, and no tuple."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)

    def __len__(self) -> int:
        return len(self._shape)

    def __getitem__(self, index: int) -> int:
        return self._shape[index]


class Weights:
    """An array's, uncopied."""

    def __init__(self, a: npt.NDArray[Any]) -> None:
        assert a.flags.c_contiguous
        self.array = a


class IPluginRegistry:
    """Takes a library if it is a file."""

    def load_library(self, plugin_path: str) -> object | None:
        _record("load_library", plugin_path)
        return object() if plugin_path.endswith("good.so") else None


def init_libnvinfer_plugins(logger: ILogger, namespace: str) -> bool:
    _record("init_libnvinfer_plugins", namespace)
    return True


def get_plugin_registry() -> IPluginRegistry:
    return IPluginRegistry()


class Runtime:
    """Makes engines."""

    def __init__(self, logger: ILogger) -> None:
        assert logger.was_made
        self._logger = logger
        self.engine_host_code_allowed = False
        self.DLA_core = -1

    @property
    def num_DLA_cores(self) -> int:  # noqa: N802
        return 1

    def deserialize_cuda_engine(self, serialized_engine: Any) -> ICudaEngine | None:
        data = bytes(serialized_engine)
        _record("deserialize_cuda_engine", len(data), self.DLA_core)
        if not data.startswith(MAGIC):
            self._logger.log(Severity.ERROR, "IRuntime::deserializeCudaEngine: Error Code 1: Serialization (magic tag)")
            return None
        plan = json.loads(data[len(MAGIC) :])
        if plan.get("host_code") and not self.engine_host_code_allowed:
            self._logger.log(Severity.ERROR, "the plan has host code, which is not allowed")
            return None
        return ICudaEngine(plan, self._logger)


class ICudaEngine:
    """A plan. ``plan`` has ``tensors``, ``profiles``, ``compute``, ``weights`` and what else it is asked for."""

    def __init__(self, plan: dict[str, Any], logger: ILogger) -> None:
        self.plan, self.logger = plan, logger
        self.tensors: dict[str, dict[str, Any]] = {each["name"]: each for each in plan["tensors"]}
        self.weights = {name: np.array(value, np.float32) for name, value in plan.get("weights", {}).items()}
        self.refittable: bool = plan.get("refittable", False)
        self.streamable_weights_size: int = plan.get("streamable", 0)
        self.weight_streaming_budget_v2 = self.streamable_weights_size

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return max(1, len(self.plan.get("profiles", ())))

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode[self.tensors[name]["mode"].upper()]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name]["type"]]

    def get_tensor_shape(self, name: str) -> Dims:
        return Dims(self.tensors[name]["shape"])

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self.is_shape_inference_io(name) else TensorLocation.DEVICE

    def is_shape_inference_io(self, name: str) -> bool:
        return bool(self.tensors[name].get("is_shape"))

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat[self.tensors[name].get("format", "LINEAR")]

    def get_tensor_format_desc(self, name: str) -> str:
        return f"vectorized format {self.get_tensor_format(name).name}"

    def get_tensor_vectorized_dim(self, name: str) -> int:
        return 1 if self.get_tensor_format(name).name in _VECTORS else -1

    def get_tensor_components_per_element(self, name: str) -> int:
        return _VECTORS.get(self.get_tensor_format(name).name, 1)

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Dims]:
        fixed = [self.tensors[name]["shape"]] * 3
        profiles = self.plan.get("profiles", ())
        return [Dims(shape) for shape in (profiles[profile_index].get(name, fixed) if profiles else fixed)]

    def get_tensor_profile_values(self, profile_index: int, name: str, /) -> list[list[int]]:
        assert isinstance(profile_index, int)
        values: list[list[int]] = self.plan["profiles"][profile_index][f"{name}.values"]
        return values

    def create_execution_context(self, strategy: Any) -> IExecutionContext | None:
        _record("create_execution_context", strategy.name)
        return None if self.plan.get("has_no_context") else IExecutionContext(self)


class Refitter:
    """Gives an engine other weights."""

    def __init__(self, engine: ICudaEngine, logger: ILogger) -> None:
        self._engine, self._logger, self._given = engine, logger, dict[str, npt.NDArray[Any]]()

    def set_named_weights(self, name: str, weights: Weights) -> bool:
        known = self._engine.weights.get(name)
        if known is None or known.shape != weights.array.shape or known.dtype != weights.array.dtype:
            self._logger.log(Severity.ERROR, f"weights {name} do not match any that can be refitted")
            return False
        self._given[name] = weights.array
        return True

    def get_missing_weights(self) -> list[str]:
        return sorted(self._engine.weights.keys() - self._given.keys())

    def refit_cuda_engine(self) -> bool:
        self._engine.weights.update(self._given)
        return True


class IExecutionContext:
    """Executes a plan: shapes and addresses must have been set, and those of inputs lie inside the profile."""

    def __init__(self, engine: ICudaEngine) -> None:
        self._engine, self._profile = engine, 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}
        self._work: list[Any] = []

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        _record("set_optimization_profile_async", profile_index, stream_handle)
        assert stream_handle
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        _record("set_input_shape", name, shape)
        least, _, most = self._engine.get_tensor_profile_shape(name, self._profile)
        fits = len(least) == len(shape) and all(least[axis] <= size <= most[axis] for axis, size in enumerate(shape))
        if not fits:
            return self._fail(f"Static dimension mismatch while setting input shape for {name}")
        self._shapes[name] = tuple(shape)
        return True

    def get_tensor_shape(self, name: str) -> Dims:
        declared = tuple(self._engine.tensors[name]["shape"])
        if self._engine.tensors[name]["mode"] == "input":
            return Dims(self._shapes.get(name, declared))
        return Dims(self._output_shapes().get(name, declared))

    def set_tensor_address(self, name: str, memory: int) -> bool:
        _record("set_tensor_address", name, memory)
        self._addresses[name] = memory
        if memory % 256:
            return self._fail(f"the address of {name} is not aligned to 256 bytes")
        return bool(memory)

    def set_output_allocator(self, name: str, output_allocator: Any) -> bool:
        _record("set_output_allocator", name)
        assert output_allocator.was_made
        self._allocators[name] = output_allocator
        return True

    def infer_shapes(self) -> list[str]:
        return [
            name
            for name, each in self._engine.tensors.items()
            if each["mode"] == "input"
            and (-1 in self._shape(name) or (each.get("is_shape") and name not in self._addresses))
        ]

    def execute_async_v3(self, stream_handle: int) -> bool:
        _record("execute_async_v3", stream_handle)
        if missing := self.infer_shapes():
            return self._fail(f"not all shapes are specified: {missing}")
        names = self._engine.tensors.keys() - self._addresses.keys() - self._allocators.keys()
        if names:
            return self._fail(f"no address for {sorted(names)}")
        if self._engine.plan.get("fails"):
            return self._fail("IExecutionContext::enqueueV3: Error Code 1: Cuda Runtime (simulated failure)")
        shapes = {name: self._shape(name) for name in self._engine.tensors}
        shapes |= self._output_shapes()
        work: Callable[..., None] = _WORK(lambda _: self._compute(shapes, dict(self._addresses)))
        late = [step for step in self._engine.plan["compute"] if step["output"] in self._allocators]
        if late:  # what depends on data is known only when all before it is done
            _driver().cuStreamSynchronize(ctypes.c_void_p(stream_handle))
            return all(self._compute_late(step, shapes) for step in late)
        self._work.append(work)
        _driver().standin_launch(ctypes.c_void_p(stream_handle), work, None)
        return True

    def _fail(self, text: str) -> bool:
        self._engine.logger.log(Severity.ERROR, text)
        return False

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name, tuple(self._engine.tensors[name]["shape"]))

    def _output_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for step in self._engine.plan["compute"]:
            source = shapes.get(step["inputs"][0]) or self._shape(step["inputs"][0])
            if step["op"] == "broadcast":
                values = self._read(step["inputs"][1], self._shape(step["inputs"][1]), self._addresses)
                shapes[step["output"]] = tuple(int(value) for value in values)
            elif step["op"] == "shape":
                shapes[step["output"]] = (len(source),)
            elif step["op"] == "nonzero":
                shapes[step["output"]] = (-1,)
            else:
                shapes[step["output"]] = source
        return shapes

    def _read(self, name: str, shape: tuple[int, ...], addresses: dict[str, int]) -> npt.NDArray[Any]:
        dtype = np.dtype(_NUMPY[self._engine.tensors[name]["type"]])
        memory = (ctypes.c_uint8 * (prod(shape) * dtype.itemsize)).from_address(addresses[name])
        array: npt.NDArray[Any] = np.frombuffer(memoryview(memory), np.uint8).view(dtype).reshape(shape)
        return array

    def _compute(self, shapes: dict[str, tuple[int, ...]], addresses: dict[str, int]) -> None:
        for step in self._engine.plan["compute"]:
            inputs = [self._read(name, shapes[name], addresses) for name in step["inputs"]]
            target = self._read(step["output"], shapes[step["output"]], addresses)
            target[...] = self._result(step, inputs, target)

    def _compute_late(self, step: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> bool:
        (found,) = np.nonzero(self._read(step["inputs"][0], shapes[step["inputs"][0]], self._addresses).ravel())
        allocator = self._allocators[step["output"]]
        address = allocator.reallocate_output_async(step["output"], 0, max(1, 4 * found.size), 256, 1)
        if not address:
            return self._fail(f"no memory for {step['output']}")
        allocator.notify_shape(step["output"], Dims(found.shape))
        target = self._read(step["output"], found.shape, {step["output"]: address})
        target[...] = found
        return True

    def _result(self, step: dict[str, Any], inputs: list[npt.NDArray[Any]], target: npt.NDArray[Any]) -> Any:
        operation = step["op"]
        if operation == "copy":
            return inputs[0]
        if operation == "scale":
            return inputs[0] * self._engine.weights[step["weight"]]
        if operation == "broadcast":
            return np.broadcast_to(inputs[0].reshape((inputs[0].shape[0], *[1] * (target.ndim - 1))), target.shape)
        if operation == "shape":
            return inputs[0].shape
        return inputs[0] + inputs[1] if operation == "add" else inputs[0] - inputs[1]


def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
