"""A tensor on a device that the host simulates: it tests `headrace.DeviceTensor`s without a GPU."""

from __future__ import annotations

from asyncio import _get_running_loop
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import DeviceTensor

_CPU = 1, 0


class PlayedDeviceTensor(DeviceTensor):
    """The elements of ``array`` on a simulated device. ``copies`` has the shape of each copy to the host.

    A copy on an event loop raises `RuntimeError`.
    """

    def __init__(self, array: npt.NDArray[Any], copies: list[tuple[int, ...]] | None = None) -> None:
        super().__init__(array.shape, array.dtype)
        self.copies: list[tuple[int, ...]] = [] if copies is None else copies
        self.memory = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CPU

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        return np.array(self.memory).__dlpack__(**options)  # a writable copy: some readers refuse a read-only one

    def copy_to_host(self) -> npt.NDArray[Any]:
        if _get_running_loop() is not None:
            raise RuntimeError("a copy from a device would block the event loop")
        self.copies.append(self.shape)
        copied: npt.NDArray[Any] = self.memory.copy()
        return copied

    def view(self, rows: slice, shape: Sequence[int]) -> PlayedDeviceTensor:
        return PlayedDeviceTensor(self.memory[rows].reshape(shape), self.copies)
