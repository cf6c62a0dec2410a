"""Binds tensors on a GPU for one session: inputs by their addresses, and outputs in the memory of the engine.

ONNX Runtime computes on its own stream, and waits for it, so outputs are complete when a run returns. It does not wait
for other streams. So before a run, a stream of this module waits for the writers of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import BackendError, Code, DeviceTensor, StackedTensors, dtypes, on_host
from headrace_engines import AddressedTensor, CudaError, CudaLibrary, address_of

#: The number of each data type in ``onnx.TensorProto``.
_ELEMENTS: Mapping[np.dtype[Any], int] = {
    dtypes.FP32.numpy: 1,
    dtypes.UINT8.numpy: 2,
    dtypes.INT8.numpy: 3,
    dtypes.UINT16.numpy: 4,
    dtypes.INT16.numpy: 5,
    dtypes.INT32.numpy: 6,
    dtypes.INT64.numpy: 7,
    dtypes.BOOL.numpy: 9,
    dtypes.FP16.numpy: 10,
    dtypes.FP64.numpy: 11,
    dtypes.UINT32.numpy: 12,
    dtypes.UINT64.numpy: 13,
    dtypes.BF16.numpy: 16,
}
_DTYPES = {element: dtype for dtype, element in _ELEMENTS.items()}
_BYTE = 2
#: Kernels read at most 16 bytes at once, from multiples of 16.
_ALIGNMENT = 16
#: Rows of at least this many bytes are copied to the device one by one, as fast as they could be joined on the host.
_LARGE_BYTES = 1 << 16
#: The engine does not copy an array of at least this many bytes, since it holds the interpreter's lock meanwhile.
_LONG_BYTES = 1 << 20
#: CUDA, in DLPack's numbers.
_CUDA = 2


class OrtMemory:
    """The memory of an OrtValue on a device: a `headrace_engines.AddressedMemory`.

    It keeps ``owners`` alive: the session, which owns the allocator, and an input with the same memory.
    """

    __slots__ = ("_address", "_library", "_owners", "device", "value")

    def __init__(self, value: Any, device: tuple[int, int], library: CudaLibrary, *owners: Any) -> None:
        self.device, self.value = device, value
        self._library, self._owners = library, owners
        self._address: int = value.data_ptr()

    def address(self, offset: int) -> int:
        return self._address + offset

    def copy(self, offset: int, size: int) -> memoryview:
        copied = np.empty(size, np.uint8)
        try:
            with self._library.using(self.device[1]):
                self._library.read(copied.ctypes.data, self._address + offset, size)
        except CudaError as error:
            raise BackendError(f"onnx runtime error: {error}", Code.INTERNAL) from error
        return copied.data


class OrtTensor(AddressedTensor):
    """A whole result. The engine copies a small one to the host, holding the interpreter's lock, since reacquiring it
    beside a busy event loop would take longer."""

    __slots__ = ()

    def copy_to_host(self) -> npt.NDArray[Any]:
        memory: Any = self._memory
        if memory.device[0] != _CUDA or self.dtype == dtypes.BF16.numpy or self.nbytes >= _LARGE_BYTES:
            return super().copy_to_host()
        array: npt.NDArray[Any] = memory.value.numpy().reshape(self.shape)
        return array


class DeviceBinding:
    """Binds the tensors of an instance of ``session`` on the CUDA device ``number``. One execution at a time.

    ``ort_value`` is the engine's class ``OrtValue``.
    """

    def __init__(self, session: Any, ort_value: Any, library: CudaLibrary, number: int) -> None:
        self.session, self.ort_value, self.library, self.number = session, ort_value, library, number
        #: Makes an OrtValue with memory of the session, or of the whole process in versions before 1.31.
        self.make = getattr(session, "create_ortvalue_from_shape_and_type", ort_value.ortvalue_from_shape_and_type)
        self.device = library.kind, number
        #: The engine's name and number of the device. Tests have one in the memory of the host.
        self.where = ("cuda" if library.kind == _CUDA else "cpu"), number
        library.use(number)
        #: The stream of copies, which also waits for the writers of inputs.
        self.stream = library.new_stream()

    def close(self) -> None:
        self.library.use(self.number)
        self.library.end_stream(self.stream)


class Execution:
    """The tensors of one execution. ``binding`` is the engine's object. Inputs are kept alive until `end`."""

    def __init__(self, device: DeviceBinding) -> None:
        self.binding: Any = device.session.io_binding()
        self._device, self._stream = device, device.stream
        #: The memory of inputs, by their addresses.
        self._memory: dict[int, Any] = {}
        self._is_pending = False

    def input(self, name: str, tensor: npt.NDArray[Any] | DeviceTensor | StackedTensors) -> None:
        """Bind ``tensor`` to the input ``name``, if possible without a copy. Call `begin` after the last input."""
        if isinstance(tensor, np.ndarray) and tensor.nbytes < _LONG_BYTES:
            self._array(name, tensor)
            return
        parts = tensor.parts if isinstance(tensor, StackedTensors) else [tensor]
        addresses = [None if type(part) is np.ndarray else self._address_of(part) for part in parts]
        size = prod(tensor.shape) * tensor.dtype.itemsize
        if not any(addresses) and size < (_LONG_BYTES if len(parts) == 1 else _LARGE_BYTES * len(parts)):
            self._array(name, on_host(tensor))
            return
        address = addresses[0]
        if len(parts) > 1 or address is None or address % _ALIGNMENT:
            address = self._joined(parts, addresses, size)
        self.binding.bind_input(name, *self._device.where, _ELEMENTS[tensor.dtype], tensor.shape, address)

    def begin(self) -> None:
        """Wait until the inputs are complete. Blocks."""
        if self._is_pending:
            self._device.library.use(self._device.number)  # an engine may have changed the current device
            self._device.library.finish(self._stream)
            self._is_pending = False

    def output(self, value: Any) -> Any:
        """Return ``value``, an OrtValue on the device, as a tensor that stays there."""
        shape, dtype, device = value.shape(), _DTYPES[value.element_type()], self._device
        if 0 in shape:
            return np.empty(shape, dtype)
        owner = self._memory.get(value.data_ptr()) if self._memory else None
        return OrtTensor(OrtMemory(value, device.device, device.library, device.session, owner), 0, shape, dtype)

    def end(self) -> None:
        """Release the inputs, also after an error."""
        try:
            self.begin()
        finally:
            self._memory = {}

    def _array(self, name: str, array: npt.NDArray[Any]) -> None:
        array = np.asarray(array, order="C")  # `np.ascontiguousarray` would add an axis to a scalar
        if array.dtype == dtypes.BF16.numpy:
            make = self._device.ort_value.ortvalue_from_numpy_with_onnx_type
            self.binding.bind_ortvalue_input(name, make(array.view(np.uint16), _ELEMENTS[array.dtype]))
        else:
            self.binding.bind_cpu_input(name, array)

    def _address_of(self, part: npt.NDArray[Any] | DeviceTensor) -> int | None:
        """Return the address of ``part``; None if it is not on the device, or has gaps."""
        if not isinstance(part, DeviceTensor) or part.__dlpack_device__() != self._device.device or not part.nbytes:
            return None
        capsule: Any = part.__dlpack__(stream=self._stream)
        address = address_of(capsule)
        if address is not None:
            self._memory[address] = capsule
            self._is_pending = True
        return address

    def _joined(self, parts: Sequence[Any], addresses: Sequence[int | None], size: int) -> int:
        """Return the address of ``size`` bytes of new memory with the concatenated ``parts``."""
        device, stream = self._device, self._stream
        value = device.make([size], _BYTE, *device.where)
        first = target = int(value.data_ptr())
        sources: list[Any] = [value]
        self._memory[first] = sources
        device.library.use(device.number)  # an engine may have changed the current device
        self._is_pending = True
        for part, address in zip(parts, addresses, strict=True):
            if address is not None:
                device.library.queue_copy(target, address, part.nbytes, stream)
            else:
                array = np.ascontiguousarray(on_host(part))
                sources.append(array)
                device.library.queue_write(target, array.ctypes.data, part.nbytes, stream)
            target += part.nbytes
        return first
