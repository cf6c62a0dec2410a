"""All calls to TensorRT: the plan as an engine on a GPU, its contexts, and its weights.

For TensorRT 11 and 10: it uses the names of tensors, and no numbers of bindings. TensorRT is imported when the first
model needs it. It reports errors to its logger, from where the exceptions of this module get their texts.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from headrace import BackendError, Code, ConfigError, InvalidArgument, LoadError, open_regular
from headrace_tensorrt.element_types import ELEMENT_TYPES
from headrace_tensorrt.plan_shapes import Bounds, PlanTensor, Profile, Shape
from headrace_tensorrt.tensorrt_api import TrtCudaEngine, TrtDims, TrtExecutionContext, TrtModule

log = logging.getLogger("headrace.tensorrt")

#: The command for a missing engine. A wheel of TensorRT is for one major version of CUDA.
INSTALLS = "pip install tensorrt-cu13 (tensorrt-cu12 for a driver of CUDA 12)"
_OLDEST = 10
#: Held while an engine or a context is created, as in Triton (docs/spec/behaviours.md section 10.5).
_making = threading.Lock()
#: The loaded libraries of plugins; an empty name is TensorRT's own.
_loaded: set[str] = set()


@cache
def load_engine() -> TrtModule:
    """Return the module ``tensorrt``. Raises `LoadError` with the command that installs it."""
    try:
        import tensorrt
    except ImportError as error:
        raise LoadError(
            f"backend 'tensorrt' needs TensorRT, which cannot be imported ({error}); run: {INSTALLS}"
        ) from error
    version = str(tensorrt.__version__)
    if int(version.partition(".")[0]) < _OLDEST:
        raise LoadError(f"backend 'tensorrt' needs TensorRT {_OLDEST} or later, not {version}; run: {INSTALLS}")
    return cast("TrtModule", tensorrt)


@cache
def engine_log() -> Any:
    """Return TensorRT's logger. ``reason(what)`` returns ``what`` with the last error of the calling thread."""
    thread = threading.local()
    levels = {
        "INTERNAL_ERROR": logging.ERROR,
        "ERROR": logging.ERROR,
        "WARNING": logging.WARNING,
        "INFO": logging.DEBUG,
    }

    class EngineLog(load_engine().ILogger):  # type: ignore[misc]
        """Passes TensorRT's log to Python's logging, without debug messages."""

        def log(self, severity: Any, msg: str) -> None:
            level = levels.get(severity.name)
            if level == logging.ERROR:
                thread.error = msg.strip()
            if level is not None:
                log.log(level, "TensorRT: %s", msg.strip())

        def reason(self, what: str) -> str:
            error, thread.error = getattr(thread, "error", ""), ""
            return f"{what}: {error}" if error else what

    return EngineLog()


def load_plugins(libraries: str) -> None:
    """Load TensorRT's own plugins, and those in ``libraries``, paths separated by ``;``, once per process.

    Raises `LoadError` naming the library that cannot be loaded.
    """
    trt = load_engine()
    with _making:
        if not _loaded:
            trt.init_libnvinfer_plugins(engine_log(), "")
            _loaded.add("")
        for library in (each.strip() for each in libraries.split(";")):
            if library in _loaded:
                continue
            if trt.get_plugin_registry().load_library(library) is None:
                raise LoadError(engine_log().reason(f"backend option plugins: '{library}' cannot be loaded"))
            _loaded.add(library)


class PlanEngine:
    """A plan on the GPU that the thread has entered. Many `PlanContext`s may share it, each on its own thread."""

    def __init__(self, path: Path, *, allows_host_code: bool = False, dla_core: int = -1) -> None:
        """``allows_host_code`` allows the runtime in a version-compatible plan, which is code that runs on the host.

        Raises `LoadError` naming the file, or `ConfigError` for an accelerator core that does not exist.
        """
        trt = load_engine()
        with _making:
            try:
                runtime = trt.Runtime(engine_log())
            except (RuntimeError, TypeError) as error:  # pybind's error if no object was created
                raise LoadError(engine_log().reason(f"TensorRT cannot start: {error}")) from error
            if allows_host_code:
                runtime.engine_host_code_allowed = True
            if dla_core >= 0:
                if dla_core >= runtime.num_DLA_cores:
                    raise ConfigError(f"there is no NVDLA core {dla_core}: TensorRT knows {runtime.num_DLA_cores}")
                runtime.DLA_core = dla_core
            engine = _deserialize(runtime.deserialize_cuda_engine, path)
        self._runtime = runtime  # must outlive its engine
        self._engine = engine
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        self.tensors = tuple(_describe(engine, name) for name in names)
        self.profiles = tuple(
            _profile(engine, self.tensors, index) for index in range(engine.num_optimization_profiles)
        )

    def open_context(self, strategy: str, profile: int, stream: int) -> PlanContext:
        """Return a context for ``profile``; ``strategy`` is ``STATIC`` or ``ON_PROFILE_CHANGE``. Raises `LoadError`."""
        member = getattr(load_engine().ExecutionContextAllocationStrategy, strategy)
        with _making:
            context = self._engine.create_execution_context(member)
            if context is None:
                raise LoadError(engine_log().reason("unable to create TensorRT context"))
            if not context.set_optimization_profile_async(profile, stream):
                raise LoadError(engine_log().reason(f"cannot set the optimization profile {profile}"))
        return PlanContext(context)

    def refit(self, weights: Mapping[str, npt.NDArray[Any]], source: str) -> None:
        """Replace weights of the engine, before it has contexts. ``source`` is their file.

        Raises `LoadError` naming the wrong or missing weight.
        """
        if not self._engine.refittable:
            raise LoadError(f"'{source}': the plan cannot be refitted: build it with the flag REFIT")
        trt, arrays = load_engine(), []
        refitter = trt.Refitter(self._engine, engine_log())
        for name, array in weights.items():
            arrays.append(np.ascontiguousarray(array))  # TensorRT keeps the address until it has refitted
            if not refitter.set_named_weights(name, trt.Weights(arrays[-1])):
                raise LoadError(engine_log().reason(f"'{source}': weight '{name}' {array.dtype}{list(array.shape)}"))
        if missing := refitter.get_missing_weights():
            raise LoadError(f"'{source}': these weights must be given, too: {', '.join(missing[:10])}")
        if not refitter.refit_cuda_engine():
            raise LoadError(engine_log().reason(f"'{source}': the engine cannot be refitted"))

    def stream_weights(self, budget_bytes: int) -> None:
        """Keep at most ``budget_bytes`` of the weights on the GPU, and copy the rest there during executions.

        Call it before there are contexts. Raises `ConfigError` for a plan that was not built for it.
        """
        if not self._engine.streamable_weights_size:
            raise ConfigError(
                "weight_streaming_budget_bytes: the plan has no weights to stream: build it with the flag "
                "WEIGHT_STREAMING"
            )
        self._engine.weight_streaming_budget_v2 = budget_bytes


class PlanContext:
    """Executes an engine, for one profile. One thread at a time."""

    def __init__(self, context: TrtExecutionContext) -> None:
        self._context = context
        self._allocators: list[Any] = []  # TensorRT keeps no reference
        self.enqueue_on: Callable[[int], bool] = context.execute_async_v3

    def set_shape(self, name: str, shape: Shape) -> None:
        """Set the shape of an input. Raises `InvalidArgument` in Triton's words."""
        if not self._context.set_input_shape(name, shape):
            what = f"trt failed to set input shape to {list(shape)} for input '{name}'"
            raise InvalidArgument(engine_log().reason(what))

    def set_address(self, name: str, address: int) -> None:
        """Set the address of a tensor: on the device, or on the host if `PlanTensor.is_on_host`."""
        if not self._context.set_tensor_address(name, address):
            raise BackendError(engine_log().reason(f"TensorRT takes no address for '{name}'"), Code.INTERNAL)

    def infer_shapes(self) -> None:
        """Compute the shapes of the outputs. Raises `InvalidArgument` if an input's shape or value is missing."""
        try:
            missing = self._context.infer_shapes()
        except RuntimeError as error:
            raise InvalidArgument(engine_log().reason(str(error))) from error
        if missing:
            raise InvalidArgument(f"TensorRT cannot work out shapes: too little is known of {', '.join(missing)}")

    def shape_of(self, name: str) -> Shape:
        """Return the shape of an output; -1 for dims that only the execution determines."""
        return _shape(self._context.get_tensor_shape(name))

    def allocate_with(self, name: str, allocate: Callable[[int], int], set_shape: Callable[[Shape], None]) -> None:
        """Allocate the output ``name``, whose size is known only during the execution, by ``allocate(size_bytes)``.

        ``set_shape`` gets its shape. Both are called while the context executes, and must not raise.
        """

        class OutputAllocator(load_engine().IOutputAllocator):  # type: ignore[misc]
            def reallocate_output(self, tensor_name: str, memory: Any, size: int, alignment: int) -> int:
                return allocate(size)

            def reallocate_output_async(
                self, tensor_name: str, memory: Any, size: int, alignment: int, stream: int
            ) -> int:
                return allocate(size)

            def notify_shape(self, tensor_name: str, shape: TrtDims) -> None:
                set_shape(_shape(shape))

        allocator = OutputAllocator()
        self._allocators.append(allocator)
        if not self._context.set_output_allocator(name, allocator):
            raise BackendError(engine_log().reason(f"TensorRT takes no allocator for '{name}'"), Code.INTERNAL)

    def enqueue(self, stream: int) -> None:
        """Start the execution. Raises `BackendError` (internal)."""
        if not self.enqueue_on(stream):
            raise BackendError(engine_log().reason("TensorRT cannot execute"), Code.INTERNAL)


def _deserialize(make: Callable[[Any], TrtCudaEngine | None], path: Path) -> TrtCudaEngine:
    """Return the engine of the plan in ``path``. The file is mapped and not read, since plans take gigabytes."""
    with open_regular(path) as file:
        try:
            plan = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise LoadError(f"'{path}' is no TensorRT plan: it is empty") from error
        engine = make(plan)
    if engine is None:
        raise LoadError(
            engine_log().reason(f"'{path}' is no plan that this TensorRT ({load_engine().__version__}) takes")
        )
    return engine


def _describe(engine: TrtCudaEngine, name: str) -> PlanTensor:
    element = engine.get_tensor_dtype(name).name
    is_linear = engine.get_tensor_format(name).name == "LINEAR"
    return PlanTensor(
        name,
        engine.get_tensor_mode(name).name == "INPUT",
        ELEMENT_TYPES.get(element),
        element,
        _shape(engine.get_tensor_shape(name)),
        is_shape_tensor=engine.is_shape_inference_io(name),
        is_on_host=engine.get_tensor_location(name).name == "HOST",
        format="" if is_linear else engine.get_tensor_format_desc(name),
        vector_axis=-1 if is_linear else engine.get_tensor_vectorized_dim(name),
        vector_length=1 if is_linear else engine.get_tensor_components_per_element(name),
    )


def _profile(engine: TrtCudaEngine, tensors: Sequence[PlanTensor], index: int) -> Profile:
    inputs = [tensor for tensor in tensors if tensor.is_input]
    shapes = {
        each.name: Bounds(*(_shape(dims) for dims in engine.get_tensor_profile_shape(each.name, index)))
        for each in inputs
    }
    values = {each.name: _values(engine, each.name, index) for each in inputs if each.is_shape_tensor}
    return Profile(index, shapes, values)


def _values(engine: TrtCudaEngine, name: str, profile: int) -> Bounds:
    rows = engine.get_tensor_profile_values(profile, name)
    if not rows:
        raise LoadError(f"the plan's profile {profile} does not say what the values of shape tensor '{name}' may be")
    return Bounds(*(tuple(map(int, row)) for row in rows))


def _shape(dims: TrtDims) -> Shape:
    return tuple(dims[axis] for axis in range(len(dims)))
