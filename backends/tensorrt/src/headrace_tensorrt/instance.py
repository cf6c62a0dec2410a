"""How an instance executes a plan: copies in, TensorRT, copies out, all on one stream, and one wait for it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BackendError, Code, Instance, Tensor, Tensors
from headrace_tensorrt.buffers import GrowingOutput, TensorBuffer, address_of
from headrace_tensorrt.cuda import CudaDevice, CudaStream
from headrace_tensorrt.graph_specs import GraphSpec, find
from headrace_tensorrt.plan_engine import PlanContext, PlanEngine
from headrace_tensorrt.plan_shapes import PlanTensor, Profile, Shape, choose

#: Input shapes whose executions an instance remembers; those of a model are few, or too many for any number.
_REMEMBERED = 256


@dataclass(frozen=True, slots=True)
class ExecutionSettings:
    """What a config says of the executions of an instance. ``profiles`` are indices; ``graphs`` are for each of them.

    ``max_rows`` is the config's ``max_batch_size``. ``dims`` are the config's dims of inputs, without the batch axis;
    the first axis of ``ragged`` inputs is no batch. ``outputs`` are those that are asked for at all.
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
    """One execution, known by the shapes of its inputs: its context, what to tell that, and what comes out of it.

    ``values`` are those of shape tensors. ``captured`` stands for all of it, if it is not 0.
    """

    context: PlanContext
    shapes: Mapping[str, Shape]
    values: Mapping[str, Shape]
    outputs: Sequence[tuple[PlanTensor, Shape]] = ()
    captured: int = 0


class PlanInstance(Instance):
    """Executes an engine that others may share. Lives on one thread, which has entered the device."""

    def __init__(self, engine: PlanEngine, device: CudaDevice, settings: ExecutionSettings) -> None:
        self._engine, self._device, self._settings = engine, device, settings
        self._inputs = [tensor for tensor in engine.tensors if tensor.is_input]
        self._outputs = [tensor for tensor in engine.tensors if not tensor.is_input]
        self._profiles = [engine.profiles[index] for index in settings.profiles]
        self._shape_tensors = [tensor for tensor in self._inputs if tensor.is_shape_tensor]
        self._sent = [tensor.name for tensor in self._inputs if not tensor.is_shape_tensor]
        #: An input whose first axis has the rows of the batch.
        self._batched = next((name for name in self._sent if name not in settings.ragged), "")
        self._buffers: dict[str, TensorBuffer] = {}
        self._growing: dict[str, GrowingOutput] = {}
        self._prepared: dict[object, PreparedExecution] = {}
        self._captured: dict[int, list[tuple[GraphSpec, PreparedExecution]]] = {}
        self._current: dict[int, PreparedExecution] = {}
        self._allocation_error: Exception | None = None
        self._stream = CudaStream(device, settings.priority, settings.spins)
        self._contexts: dict[int, PlanContext] = {}
        try:
            for profile in self._profiles:
                context = engine.open_context(settings.strategy, profile.index, self._stream.handle)
                self._contexts[profile.index] = context
            self._stream.wait()
            for tensor in self._inputs:
                size = max(tensor.size_bytes(self._largest(profile, tensor)) for profile in self._profiles)
                self._buffers[tensor.name] = TensorBuffer(device, tensor, size, settings.pins_inputs)
            for profile in self._profiles:
                self._size_outputs(profile)
            self._bind()
            wanted = [tensor for tensor in self._outputs if tensor.name in settings.outputs]
            self._late = [tensor for tensor in wanted if tensor.name in self._growing]
            self._on_host = [tensor for tensor in wanted if tensor.is_on_host and tensor.name not in self._growing]
        except BaseException:
            self.close()
            raise

    @property
    def stream_priority(self) -> int:
        return self._stream.priority

    # ------------------------------------------------------------------ at load

    def _largest(self, profile: Profile, tensor: PlanTensor) -> Shape:
        """The largest shape that the config and ``profile`` allow an input."""
        most = profile.shapes[tensor.name].most
        if tensor.is_shape_tensor or tensor.name in self._settings.ragged:
            return most
        batch = 1 if self._settings.max_rows else 0
        rows = (min(most[0], self._settings.max_rows),) if batch else ()
        dims = self._settings.dims.get(tensor.name, (-1,) * (len(most) - batch))
        return (*rows, *(large if dim < 0 else min(dim, large) for dim, large in zip(dims, most[batch:], strict=True)))

    def _size_outputs(self, profile: Profile) -> None:
        """Make the places of the outputs, as large as they are for the largest inputs of ``profile``."""
        context = self._contexts[profile.index]
        largest = {tensor.name: self._largest(profile, tensor) for tensor in self._inputs}
        values = {name: bounds.most for name, bounds in profile.values.items()}
        self._tell(PreparedExecution(context, largest, values))
        for tensor in self._outputs:
            shape = context.shape_of(tensor.name)
            if -1 in shape:
                if tensor.name not in self._growing:
                    self._growing[tensor.name] = GrowingOutput(self._device, tensor, self._note_allocation_error)
            elif tensor.name in self._buffers:
                self._buffers[tensor.name].reserve(tensor.size_bytes(shape))
            else:
                self._buffers[tensor.name] = TensorBuffer(self._device, tensor, tensor.size_bytes(shape), False)

    def _bind(self) -> None:
        """Tell every context where everything lies."""
        for context in self._contexts.values():
            for name, buffer in self._buffers.items():
                context.set_address(name, buffer.address)
            for name, output in self._growing.items():
                context.allocate_with(name, output.allocate, output.tell_shape)

    def _note_allocation_error(self, error: Exception) -> None:
        self._allocation_error = error

    def warm_up(self) -> None:
        """Execute every profile once, on zeros, and capture what is to be captured."""
        for name in self._sent:
            self._buffers[name].clear(self._stream)
        for profile in self._profiles:
            best = {name: self._capped(name, bounds.best) for name, bounds in profile.shapes.items()}
            self._run(self._prepare_plain(profile, best, {name: each.best for name, each in profile.values.items()}))
            self._stream.wait()
            specs = () if self._growing or self._shape_tensors else self._settings.graphs.get(profile.index, ())
            self._captured[profile.index] = [(spec, self._capture(profile, spec)) for spec in specs]

    def _capped(self, name: str, shape: Shape) -> Shape:
        """``shape`` with no more rows than the largest batch has."""
        has_rows = self._settings.max_rows and name in self._sent and name not in self._settings.ragged
        return (min(shape[0], self._settings.max_rows), *shape[1:]) if has_rows else shape

    def _capture(self, profile: Profile, spec: GraphSpec) -> PreparedExecution:
        run = self._prepare_plain(profile, spec.shapes, {})
        self._run(run)  # what TensorRT does once for new shapes must not be in the graph
        self._stream.wait()
        self._stream.begin_capture()
        try:
            run.context.enqueue(self._stream.handle)
        except BaseException:
            self._stream.abandon_capture()
            raise
        run.captured = self._stream.end_capture()
        return run

    # ------------------------------------------------------------------ per execution

    def execute(self, inputs: Tensors) -> Tensors:
        try:
            return self._execute(inputs)
        except BaseException:
            # What was begun must be over before the next execution uses its memory.
            self._stream.settle()
            self._current.clear()
            raise

    def _execute(self, inputs: Tensors) -> Tensors:
        shapes = [inputs[name].shape for name in self._sent]
        values: dict[str, Shape] = {}
        key: object = tuple(shapes)
        if self._shape_tensors:
            values = self._values(inputs)
            key = (key, *values.values())
        run = self._prepared.get(key)
        if run is None:
            run = self._prepared_for(dict(zip(self._sent, shapes, strict=True)), values)
            if len(self._prepared) >= _REMEMBERED:
                self._prepared.clear()
            self._prepared[key] = run
        kept = [self._copy_in(self._buffers[name], inputs[name]) for name in self._sent]
        self._run(run)
        outputs = {tensor.name: self._copy_out(tensor, shape) for tensor, shape in run.outputs}
        if self._growing:
            self._stream.wait()  # only now their shapes are known
            outputs |= {tensor.name: self._copy_out(tensor, self._growing[tensor.name].shape) for tensor in self._late}
        self._stream.wait()
        del kept
        for tensor in self._on_host:
            outputs[tensor.name] = self._host_output(tensor, outputs[tensor.name].shape)
        return outputs

    def _values(self, inputs: Tensors) -> dict[str, Shape]:
        """The values of the shape tensors; those of a model that batches begin with the size of the batch."""
        rows = (inputs[self._batched].shape[0],) if self._settings.max_rows and self._batched else ()
        return {
            tensor.name: (*(rows if tensor.shape else ()), *map(int, np.asarray(inputs[tensor.name]).ravel()))
            for tensor in self._shape_tensors
        }

    def _prepared_for(self, shapes: dict[str, Shape], values: Mapping[str, Shape]) -> PreparedExecution:
        for tensor in self._shape_tensors:
            shapes[tensor.name] = (len(values[tensor.name]),) if tensor.shape else ()
        profile = choose(self._profiles, shapes, values, self._settings.name)
        captured = self._captured.get(profile.index, ())
        spec = find([spec for spec, _ in captured], shapes)
        if spec is None:
            return self._prepare_plain(profile, shapes, values)
        run = next(run for each, run in captured if each is spec)
        if shapes == spec.shapes:
            return run
        rows = shapes[self._batched][0]
        return replace(run, outputs=[(tensor, (rows, *shape[1:])) for tensor, shape in run.outputs])

    def _prepare_plain(
        self, profile: Profile, shapes: Mapping[str, Shape], values: Mapping[str, Shape]
    ) -> PreparedExecution:
        run = PreparedExecution(self._contexts[profile.index], shapes, values)
        self._tell(run)
        run.outputs = [
            (tensor, run.context.shape_of(tensor.name))
            for tensor in self._outputs
            if tensor.name in self._settings.outputs and tensor.name not in self._growing
        ]
        moved = [self._buffers[tensor.name].reserve(tensor.size_bytes(shape)) for tensor, shape in run.outputs]
        if any(moved):
            self._forget_captured()
            self._bind()
        return run

    def _tell(self, run: PreparedExecution) -> None:
        """Have the context know the shapes of ``run``, and the values of its shape tensors."""
        for name, shape in run.shapes.items():
            if -1 in self._tensor(name).shape:
                run.context.set_shape(name, shape)
        self._write_values(run)
        for tensor in self._shape_tensors:
            run.context.set_address(tensor.name, self._buffers[tensor.name].address)
        run.context.infer_shapes()
        self._current[id(run.context)] = run

    def _write_values(self, run: PreparedExecution) -> None:
        for name, values in run.values.items():
            place, datatype = self._buffers[name].values, self._tensor(name).datatype
            assert place is not None
            assert datatype is not None
            raw = np.array(values, datatype.numpy).view(np.uint8)
            place[: raw.size] = raw

    def _tensor(self, name: str) -> PlanTensor:
        return next(tensor for tensor in self._inputs if tensor.name == name)

    def _run(self, run: PreparedExecution) -> None:
        if run.captured:
            self._stream.launch(run.captured)
            return
        if self._current.get(id(run.context)) is not run:
            self._tell(run)
        try:
            run.context.enqueue(self._stream.handle)
        except BackendError:
            if (error := self._allocation_error) is not None:
                self._allocation_error = None
                raise error from None
            raise

    def _copy_in(self, buffer: TensorBuffer, tensor: Tensor) -> npt.NDArray[Any] | None:
        """Begin to copy an input; what it returns must live until the copy is over."""
        array = np.ascontiguousarray(tensor)
        size = array.nbytes
        if not size:
            return None
        source = address_of(array)
        staged = buffer.staging_address
        if not staged:
            self._stream.copy_in(buffer.address, source, size)
            return array
        ctypes.memmove(staged, source, size)
        self._stream.copy_in(buffer.address, staged, size)
        return None

    def _copy_out(self, tensor: PlanTensor, shape: Shape) -> npt.NDArray[Any]:
        """Begin to copy an output into memory of its own."""
        assert tensor.datatype is not None
        size = prod(shape) * tensor.datatype.itemsize
        if not size or tensor.is_on_host:
            return np.empty(shape, tensor.datatype.numpy)
        if self._settings.pins_outputs:
            raw, target = self._device.pinned.take(size)
        else:
            raw = np.empty(size, np.uint8)
            target = address_of(raw)
        place = self._growing.get(tensor.name) or self._buffers[tensor.name]
        self._stream.copy_out(target, place.address, size)
        array: npt.NDArray[Any] = raw.view(tensor.datatype.numpy).reshape(shape)
        return array

    def _host_output(self, tensor: PlanTensor, shape: Shape) -> npt.NDArray[Any]:
        """An output that TensorRT writes to the host's memory; without the size of the batch, if it begins with it."""
        place = self._buffers[tensor.name].values
        assert place is not None
        assert tensor.datatype is not None
        array: npt.NDArray[Any] = (
            place[: prod(shape) * tensor.datatype.itemsize].view(tensor.datatype.numpy).reshape(shape).copy()
        )
        return array[1:] if tensor.is_shape_tensor and self._settings.max_rows else array

    # ------------------------------------------------------------------ afterwards

    def is_ready(self) -> bool:
        if self._device.failure:
            raise BackendError(self._device.failure, Code.INTERNAL)
        return True

    def close(self) -> None:
        self._forget_captured()
        self._current.clear()
        self._contexts.clear()
        places: list[TensorBuffer | GrowingOutput] = [*self._buffers.values(), *self._growing.values()]
        for place in places:
            place.close()
        self._buffers.clear()
        self._growing.clear()
        self._stream.close()
        self._device.pinned.trim()

    def _forget_captured(self) -> None:
        for runs in self._captured.values():
            for _, run in runs:
                self._stream.forget(run.captured)
        self._captured.clear()
        self._prepared.clear()
