"""Executes a plan: copies in, TensorRT, and copies out, all on one stream, and one wait for it."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BackendError, Code, Instance, Tensor, Tensors
from headrace_tensorrt.buffers import TensorBuffer, address_of
from headrace_tensorrt.cuda import CudaDevice, CudaStream
from headrace_tensorrt.plan_engine import PlanEngine
from headrace_tensorrt.plan_executions import ExecutionSettings, PlanExecutions
from headrace_tensorrt.plan_shapes import PlanTensor, Shape


class PlanInstance(Instance):
    """Executes an engine, which instances may share. For one thread, which has entered the device."""

    def __init__(self, engine: PlanEngine, device: CudaDevice, settings: ExecutionSettings) -> None:
        self._engine, self._device, self._settings = engine, device, settings
        self._stream = CudaStream(device, settings.priority, settings.spins)
        try:
            self._executions = PlanExecutions(engine, device, self._stream, settings)
        except BaseException:
            self._stream.close()
            raise
        outputs = [tensor for tensor in engine.tensors if not tensor.is_input and tensor.name in settings.outputs]
        self._growing = [tensor for tensor in outputs if tensor.name in self._executions.growing]
        self._on_host = [tensor for tensor in outputs if tensor.is_on_host and tensor not in self._growing]

    @property
    def stream_priority(self) -> int:
        return self._stream.priority

    def warm_up(self) -> None:
        self._executions.warm_up()

    def execute(self, inputs: Tensors) -> Tensors:
        try:
            return self._execute(inputs)
        except BaseException:
            self._executions.drain()
            raise

    def _execute(self, inputs: Tensors) -> Tensors:
        executions = self._executions
        sent, buffers = executions.sent, executions.buffers
        values = self._values(inputs) if executions.shape_tensors else {}
        run = executions.find([inputs[name].shape for name in sent], values)
        sources = [self._copy_in(buffers[name], inputs[name]) for name in sent]
        executions.run(run)
        outputs = {tensor.name: self._copy_out(tensor, shape) for tensor, shape in run.outputs}
        if self._growing:
            self._stream.wait()  # their shapes are unknown before
            shapes = {tensor.name: executions.growing[tensor.name].shape for tensor in self._growing}
            outputs |= {tensor.name: self._copy_out(tensor, shapes[tensor.name]) for tensor in self._growing}
        self._stream.wait()
        del sources
        for tensor in self._on_host:
            outputs[tensor.name] = self._host_output(tensor, outputs[tensor.name].shape)
        return outputs

    def _values(self, inputs: Tensors) -> dict[str, Shape]:
        """Return the values of the shape tensors. If the model batches, the first value is the size of the batch."""
        batched = self._executions.batched if self._settings.max_rows else ""
        rows = inputs[batched].shape[:1] if batched else ()
        return {
            tensor.name: (*(rows if tensor.shape else ()), *map(int, np.asarray(inputs[tensor.name]).ravel()))
            for tensor in self._executions.shape_tensors
        }

    def _copy_in(self, buffer: TensorBuffer, tensor: Tensor) -> npt.NDArray[Any] | None:
        """Start the copy of an input. Keep the result until the copy is complete."""
        array = np.ascontiguousarray(tensor)
        size = array.nbytes
        if not size:
            return None
        staged = buffer.stage(array)
        self._stream.copy_in(buffer.address, staged or address_of(array), size, bool(staged))
        return None if staged else array

    def _copy_out(self, tensor: PlanTensor, shape: Shape) -> npt.NDArray[Any]:
        """Start the copy of an output into new memory."""
        assert tensor.datatype is not None
        size = prod(shape) * tensor.datatype.itemsize
        if not size or tensor.is_on_host:
            return np.empty(shape, tensor.datatype.numpy)
        if self._settings.pins_outputs:
            raw, target = self._device.pinned.take(size)
        else:
            raw = np.empty(size, np.uint8)
            target = address_of(raw)
        place = self._executions.growing.get(tensor.name) or self._executions.buffers[tensor.name]
        self._stream.copy_out(target, place.address, size, self._settings.pins_outputs)
        array: npt.NDArray[Any] = raw.view(tensor.datatype.numpy).reshape(shape)
        return array

    def _host_output(self, tensor: PlanTensor, shape: Shape) -> npt.NDArray[Any]:
        """Return an output in the host's memory, without its first value if that is the size of the batch."""
        place = self._executions.buffers[tensor.name].values
        assert place is not None
        assert tensor.datatype is not None
        array: npt.NDArray[Any] = (
            place[: prod(shape) * tensor.datatype.itemsize].view(tensor.datatype.numpy).reshape(shape).copy()
        )
        return array[1:] if tensor.is_shape_tensor and self._settings.max_rows else array

    def is_ready(self) -> bool:
        if self._device.failure:
            raise BackendError(self._device.failure, Code.INTERNAL)
        return True

    def close(self) -> None:
        self._stream.drain()
        self._executions.close()
        self._stream.close()
        self._device.pinned.trim()
        del self._engine  # a remaining reference to this instance must not keep the weights
