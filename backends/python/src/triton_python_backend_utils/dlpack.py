"""DLPack, the exchange of tensors between frameworks, implemented with NumPy only.

NumPy creates and consumes the capsules, so lifetimes are managed in C. Types that NumPy lacks (BF16, in older releases
bool) pass as unsigned integers of the same size, and the type is written into the structure here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import DataType, DeviceTensor
from headrace_engines import DLPACK_CODES, AddressedTensor, DLTensor, dl_tensor, is_contiguous, is_dlpack
from triton_python_backend_utils.error import TritonModelException

CPU, CUDA, CUDA_HOST = 1, 2, 3
#: True in a process whose server accepts tensors in memory of a device. Else they are copied before they are sent.
stays = False

_DATA_TYPES = {code: dtype for dtype, code in DLPACK_CODES.items()}
_UNSIGNED = 1


class DeviceMemory(DeviceTensor):
    """A tensor in memory of a device. ``owner`` is the tensor of its framework, which keeps the memory alive."""

    __slots__ = ("datatype", "device", "owner")

    def __init__(self, shape: tuple[int, ...], datatype: DataType, device: tuple[int, int], owner: Any) -> None:
        super().__init__(shape, datatype.numpy)
        self.datatype, self.device, self.owner = datatype, device, owner

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        return self.owner.__dlpack__() if stream is None else self.owner.__dlpack__(stream=stream)

    def copy_to_host(self) -> npt.NDArray[Any]:
        """Return a copy that the framework makes. Raises `TritonModelException` if it cannot."""
        return to_host(self)

    def view(self, rows: slice, shape: Sequence[int]) -> DeviceTensor:
        return AddressedTensor(_Held(self), 0, self.shape, self.dtype).view(rows, shape)


class _Held:
    """The memory of a tensor that its framework keeps. A `headrace_engines.AddressedMemory`."""

    def __init__(self, tensor: DeviceMemory) -> None:
        self._tensor, self._capsule = tensor, tensor.__dlpack__()
        self.device = tensor.device

    def address(self, offset: int) -> int:
        found = dl_tensor(self._capsule)
        return int(found.data or 0) + int(found.byte_offset) + offset

    def copy(self, offset: int, size: int) -> memoryview:
        return memoryview(self._tensor.to_host().tobytes())[offset : offset + size]


def capsule_of(array: npt.NDArray[Any], datatype: DataType) -> Any:
    """Return a capsule that shares the elements of ``array``, which must be writable, and keeps it alive."""
    capsule = array.view(f"u{datatype.itemsize}").__dlpack__()
    tensor = dl_tensor(capsule)
    tensor.code, tensor.bits = DLPACK_CODES[datatype]
    return capsule


def adopt(source: Any) -> tuple[npt.NDArray[Any] | DeviceMemory, DataType]:
    """Return the tensor of a capsule, or of an object with ``__dlpack__``, on the same memory. Consumes the capsule.

    Raises `TritonModelException` for other objects, for strides, and for a type or a device that Triton lacks.
    """
    capsule = source
    if hasattr(source, "__dlpack__") and hasattr(source, "__dlpack_device__"):
        capsule = source.__dlpack__(stream=None)
    elif not is_dlpack(source):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule "
            "or have `__dlpack__` and `__dlpack_device__` attributes"
        )
    tensor = dl_tensor(capsule)
    datatype = _data_type(tensor)
    if not is_contiguous(tensor):
        raise TritonModelException(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    if tensor.device_type in (CPU, CUDA_HOST):
        return _on_host(capsule, tensor, datatype), datatype
    if tensor.device_type != CUDA:
        raise TritonModelException(f"DLDevice type {tensor.device_type} is not support by Python backend.")
    device, shape = (tensor.device_type, tensor.device_id), tuple(tensor.shape[: tensor.ndim])
    return DeviceMemory(shape, datatype, device, _owner(source, capsule)), datatype


def to_host(memory: DeviceMemory) -> npt.NDArray[Any]:
    """Return a copy in memory of the host, made by the framework that has the tensor."""
    if isinstance(memory.owner, DeviceTensor):
        return memory.owner.to_host()
    for copy in ("cpu", "get"):  # PyTorch, CuPy
        if hasattr(memory.owner, copy):
            host, _ = adopt(getattr(memory.owner, copy)())
            if isinstance(host, np.ndarray):
                return host
    raise TritonModelException(
        f"Tensor is stored in GPU, and an object of type '{type(memory.owner).__name__}' has no way to copy it to "
        "the host: copy it before you send it."
    )


@dataclass(frozen=True, slots=True)
class _Exporter:
    """A capsule in the form that NumPy accepts."""

    capsule: Any

    def __dlpack__(self, **_: object) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU, 0


class _Writable:
    """The elements of ``array`` as writable memory, since Triton allows a model to write them.

    NumPy makes them read-only, because a capsule has no flag for this.
    """

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _data_type(tensor: DLTensor) -> DataType:
    found = _DATA_TYPES.get((tensor.code, tensor.bits))
    if found is None or tensor.lanes != 1:
        raise TritonModelException(
            f"DLPack data type is not supported (code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes)."
        )
    return found


def _on_host(capsule: Any, tensor: DLTensor, datatype: DataType) -> npt.NDArray[Any]:
    tensor.code = _UNSIGNED
    array: npt.NDArray[Any] = np.from_dlpack(_Exporter(capsule))
    if array.size and not array.flags.writeable:
        array = np.asarray(_Writable(array))
    return array.view(datatype.numpy)


def _owner(source: Any, capsule: Any) -> Any:
    """Return an object that keeps memory of a device alive, and exports it any number of times."""
    if source is not capsule:
        return source
    for framework in ("torch", "cupy"):
        if framework in sys.modules:
            return sys.modules[framework].from_dlpack(capsule)
    raise TritonModelException(
        "A DLPack capsule of a GPU needs the framework that made it to be imported (torch or cupy)."
    )
