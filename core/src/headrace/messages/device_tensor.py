"""Tensors in the memory of a device, such as a GPU, which pass between models without a copy in the host's memory.

An instance gets and returns them if it declares `BaseInstance.takes_device_tensors`. Everything else gets arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.messages.tensor import concatenate


class DeviceTensor(ABC):
    """A tensor of ``shape`` and ``dtype`` (a NumPy dtype) on a device. Read-only, as every `Tensor`. Any thread.

    A backend extends this class for its engine. An engine reads the tensors of another one by DLPack.
    """

    __slots__ = ("_host", "dtype", "shape")

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._host: npt.NDArray[Any] | None = None

    @abstractmethod
    def __dlpack_device__(self) -> tuple[int, int]:
        """Return the kind of the device in DLPack's numbers, and its own number."""

    @abstractmethod
    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """Return a DLPack capsule. Work that is queued on ``stream`` later finds the tensor complete. The reader keeps
        the capsule until that work is done. Must not block until the device is idle."""

    @abstractmethod
    def copy_to_host(self) -> npt.NDArray[Any]:
        """Return a copy in the host's memory. Blocks until the tensor is complete."""

    @abstractmethod
    def view(self, rows: slice, shape: Sequence[int]) -> DeviceTensor:
        """Return ``rows`` of the first axis in ``shape``, without a copy. All rows: ``slice(None)``."""

    def to_host(self) -> npt.NDArray[Any]:
        """Return it as an array, which is copied by the first call only."""
        self._host = host = self.copy_to_host() if self._host is None else self._host
        return host

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def reshape(self, shape: Sequence[int], rows: slice = slice(None)) -> DeviceTensor:
        part = self.view(rows, shape)
        part._host = None if self._host is None else self._host[rows].reshape(shape)
        return part

    def __getitem__(self, rows: slice) -> DeviceTensor:
        return self.reshape((len(range(*rows.indices(self.shape[0]))), *self.shape[1:]), rows)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.to_host() if dtype is None else self.to_host().astype(dtype)


class StackedTensors:
    """An input of a batch of several requests, for instances that take `DeviceTensor`s. ``shape`` is the whole's.

    ``parts`` are the tensors of the requests, arrays and `DeviceTensor`s, which the instance concatenates along the
    first axis: in memory of its device, or in memory from which it copies there."""

    __slots__ = ("parts", "shape")

    def __init__(self, parts: Sequence[npt.NDArray[Any] | DeviceTensor]) -> None:
        self.parts = parts
        self.shape = (sum([part.shape[0] for part in parts]), *parts[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

    def to_host(self, out: npt.NDArray[Any] | None = None) -> npt.NDArray[Any]:
        """Return the whole as an array: ``out``, if given, of this shape and dtype. Copies every element once."""
        parts: Any = [on_host(part) for part in self.parts]
        return concatenate(parts) if out is None else np.concatenate(parts, out=out)  # type: ignore[return-value]


def on_host(tensor: Any) -> Any:
    """Return ``tensor``, or its array if it is a `DeviceTensor` or `StackedTensors`."""
    if type(tensor) is np.ndarray or not isinstance(tensor, (DeviceTensor, StackedTensors)):
        return tensor
    return tensor.to_host()
