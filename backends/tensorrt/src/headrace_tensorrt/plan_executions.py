"""The executions of an instance: the contexts of its profiles, the memory of their inputs and outputs, and a cache of
prepared executions by input shapes, with captured graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace import BackendError
from headrace_tensorrt.buffers import GrowingOutput, TensorBuffer
from headrace_tensorrt.cuda import CudaDevice, CudaStream
from headrace_tensorrt.graph_specs import GraphSpec, find
from headrace_tensorrt.plan_engine import PlanContext, PlanEngine
from headrace_tensorrt.plan_shapes import PlanTensor, Profile, Shape, choose

#: The most input shapes in the cache. A model has few shapes, or too many for any cache.
_MOST_CACHED = 256


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """The settings of a config for the executions of an instance.

    - ``max_rows``: the config's ``max_batch_size``.
    - ``profiles``: indices of profiles. ``graphs`` has the graphs to capture by these indices.
    - ``outputs``: the outputs in the config.
    - ``dims``: the config's dims of inputs, without the batch axis.
    - ``ragged``: inputs whose first axis is not the batch.
    """

    name: str
    max_rows: int
    profiles: Sequence[int]
    outputs: frozenset[str]
    strategy: str = "STATIC"
    graphs: Mapping[int, Sequence[GraphSpec]] = field(default_factory=dict)
    dims: Mapping[str, Shape] = field(default_factory=dict)
    ragged: frozenset[str] = frozenset()
    priority: int = 0
    spins: bool = False
    pins_inputs: bool = True
    pins_outputs: bool = True


@dataclass(slots=True)
class PreparedExecution:
    """One execution, identified by the shapes of its inputs: its context, its settings, and its outputs.

    ``values`` has the values of shape tensors. ``captured`` is a CUDA graph of the whole execution, or 0.
    """

    context: PlanContext
    shapes: Mapping[str, Shape]
    values: Mapping[str, Shape]
    outputs: Sequence[tuple[PlanTensor, Shape]] = ()
    captured: int = 0


class PlanExecutions:
    """The executions of one instance on ``stream``. For one thread, which has entered the device.

    ``sent`` are the inputs that are copied to the device, ``shape_tensors`` the others. ``growing`` has the outputs
    whose size is known only during the execution, and ``buffers`` the memory of all other tensors.
    """

    def __init__(self, engine: PlanEngine, device: CudaDevice, stream: CudaStream, settings: ExecutionSettings) -> None:
        self._device, self._stream, self._settings = device, stream, settings
        self._inputs = {tensor.name: tensor for tensor in engine.tensors if tensor.is_input}
        self._outputs = [tensor for tensor in engine.tensors if not tensor.is_input]
        self._profiles = [engine.profiles[index] for index in settings.profiles]
        self.shape_tensors = [tensor for tensor in self._inputs.values() if tensor.is_shape_tensor]
        self.sent = [tensor.name for tensor in self._inputs.values() if not tensor.is_shape_tensor]
        #: An input whose first axis is the batch.
        self.batched = next((name for name in self.sent if name not in settings.ragged), "")
        self.contexts: dict[int, PlanContext] = {}
        self.buffers: dict[str, TensorBuffer] = {}
        self.growing: dict[str, GrowingOutput] = {}
        self._prepared: dict[object, PreparedExecution] = {}
        self._captured: dict[int, list[tuple[GraphSpec, PreparedExecution]]] = {}
        #: The execution whose settings each context has, by the context's id.
        self._applied: dict[int, PreparedExecution] = {}
        self._allocation_error: Exception | None = None
        try:
            for profile in self._profiles:
                self.contexts[profile.index] = engine.open_context(settings.strategy, profile.index, stream.handle)
            stream.wait()
            for tensor in self._inputs.values():
                size = max(tensor.size_bytes(self._largest(profile, tensor)) for profile in self._profiles)
                self.buffers[tensor.name] = TensorBuffer(device, tensor, size, settings.pins_inputs)
            for profile in self._profiles:
                self._size_outputs(profile)
            self._bind()
        except BaseException:
            self.close()
            raise

    def find(self, shapes: Sequence[Shape], values: Mapping[str, Shape]) -> PreparedExecution:
        """Return the execution for inputs of ``shapes``, in the order of ``sent``, and for shape tensors of ``values``.

        Raises `InvalidArgument`, in Triton's words, if no profile takes them.
        """
        key = (*shapes, *values.values())
        run = self._prepared.get(key)
        if run is None:
            run = self._prepare(dict(zip(self.sent, shapes, strict=True)), values)
            if len(self._prepared) >= _MOST_CACHED:
                self._prepared.clear()
            self._prepared[key] = run
        return run

    def run(self, run: PreparedExecution) -> None:
        """Start the execution. Raises `BackendError`."""
        if run.captured:
            self._stream.launch(run.captured)
            return
        if self._applied.get(id(run.context)) is not run:
            self._apply(run)
        try:
            run.context.enqueue(self._stream.handle)
        except BackendError:
            if (error := self._allocation_error) is not None:
                self._allocation_error = None
                raise error from None
            raise

    def drain(self) -> None:
        """Wait, after a failure, for all work on the stream: the next execution uses the same memory."""
        self._stream.drain()
        self._applied.clear()

    def warm_up(self) -> None:
        """Execute every profile once, on zeros, and capture its graphs."""
        for name in self.sent:
            self.buffers[name].clear(self._stream)
        for profile in self._profiles:
            best = {name: self._capped(name, bounds.best) for name, bounds in profile.shapes.items()}
            self.run(self._prepare_plain(profile, best, {name: each.best for name, each in profile.values.items()}))
            self._stream.wait()
            specs = () if self.growing or self.shape_tensors else self._settings.graphs.get(profile.index, ())
            self._captured[profile.index] = [(spec, self._capture(profile, spec)) for spec in specs]

    def _capped(self, name: str, shape: Shape) -> Shape:
        """Return ``shape`` with at most the rows of the largest batch."""
        has_rows = self._settings.max_rows and name in self.sent and name not in self._settings.ragged
        return (min(shape[0], self._settings.max_rows), *shape[1:]) if has_rows else shape

    def _capture(self, profile: Profile, spec: GraphSpec) -> PreparedExecution:
        run = self._prepare_plain(profile, spec.shapes, {})
        self.run(run)  # TensorRT's one-time work for new shapes must not be in the graph
        self._stream.wait()
        self._stream.begin_capture()
        try:
            run.context.enqueue(self._stream.handle)
        except BaseException:
            self._stream.abandon_capture()
            raise
        run.captured = self._stream.end_capture()
        return run

    def _prepare(self, shapes: dict[str, Shape], values: Mapping[str, Shape]) -> PreparedExecution:
        for tensor in self.shape_tensors:
            shapes[tensor.name] = (len(values[tensor.name]),) if tensor.shape else ()
        profile = choose(self._profiles, shapes, values, self._settings.name)
        captured = self._captured.get(profile.index, ())
        spec = find([spec for spec, _ in captured], shapes)
        if spec is None:
            return self._prepare_plain(profile, shapes, values)
        run = next(run for each, run in captured if each is spec)
        if shapes == spec.shapes:
            return run
        rows = shapes[self.batched][0]
        return replace(run, outputs=[(tensor, (rows, *shape[1:])) for tensor, shape in run.outputs])

    def _prepare_plain(
        self, profile: Profile, shapes: Mapping[str, Shape], values: Mapping[str, Shape]
    ) -> PreparedExecution:
        run = PreparedExecution(self.contexts[profile.index], shapes, values)
        self._apply(run)
        run.outputs = [
            (tensor, run.context.shape_of(tensor.name))
            for tensor in self._outputs
            if tensor.name in self._settings.outputs and tensor.name not in self.growing
        ]
        moved = [self.buffers[tensor.name].reserve(tensor.size_bytes(shape)) for tensor, shape in run.outputs]
        if any(moved):
            self._destroy_graphs()
            self._bind()
        return run

    def _apply(self, run: PreparedExecution) -> None:
        """Set the shapes of ``run``, and the values of its shape tensors, in the context."""
        for name, shape in run.shapes.items():
            if -1 in self._inputs[name].shape:
                run.context.set_shape(name, shape)
        self._write_values(run)
        for tensor in self.shape_tensors:
            run.context.set_address(tensor.name, self.buffers[tensor.name].address)
        run.context.infer_shapes()
        self._applied[id(run.context)] = run

    def _write_values(self, run: PreparedExecution) -> None:
        for name, values in run.values.items():
            place, datatype = self.buffers[name].values, self._inputs[name].datatype
            assert place is not None
            assert datatype is not None
            raw = np.array(values, datatype.numpy).view(np.uint8)
            place[: raw.size] = raw

    def _largest(self, profile: Profile, tensor: PlanTensor) -> Shape:
        """Return the largest shape that the config and ``profile`` allow an input."""
        most = profile.shapes[tensor.name].most
        if tensor.is_shape_tensor or tensor.name in self._settings.ragged:
            return most
        batch = 1 if self._settings.max_rows else 0
        rows = (min(most[0], self._settings.max_rows),) if batch else ()
        dims = self._settings.dims.get(tensor.name, (-1,) * (len(most) - batch))
        return (*rows, *(large if dim < 0 else min(dim, large) for dim, large in zip(dims, most[batch:], strict=True)))

    def _size_outputs(self, profile: Profile) -> None:
        """Allocate the outputs, large enough for the largest inputs of ``profile``."""
        context = self.contexts[profile.index]
        largest = {tensor.name: self._largest(profile, tensor) for tensor in self._inputs.values()}
        values = {name: bounds.most for name, bounds in profile.values.items()}
        self._apply(PreparedExecution(context, largest, values))
        for tensor in self._outputs:
            shape = context.shape_of(tensor.name)
            if -1 in shape:
                if tensor.name not in self.growing:
                    self.growing[tensor.name] = GrowingOutput(self._device, tensor, self._note_allocation_error)
            elif tensor.name in self.buffers:
                self.buffers[tensor.name].reserve(tensor.size_bytes(shape))
            else:
                self.buffers[tensor.name] = TensorBuffer(self._device, tensor, tensor.size_bytes(shape), False)

    def _bind(self) -> None:
        """Set the addresses of all tensors in every context."""
        for context in self.contexts.values():
            for name, buffer in self.buffers.items():
                context.set_address(name, buffer.address)
            for name, output in self.growing.items():
                context.allocate_with(name, output.allocate, output.set_shape)

    def _note_allocation_error(self, error: Exception) -> None:
        self._allocation_error = error

    def close(self) -> None:
        """Free all memory on the device. No execution may be running."""
        self._destroy_graphs()
        self._applied.clear()
        self.contexts.clear()
        places: list[TensorBuffer | GrowingOutput] = [*self.buffers.values(), *self.growing.values()]
        for place in places:
            place.close()
        self.buffers.clear()
        self.growing.clear()

    def _destroy_graphs(self) -> None:
        for runs in self._captured.values():
            for _, run in runs:
                self._stream.destroy_graph(run.captured)
        self._captured.clear()
        self._prepared.clear()
