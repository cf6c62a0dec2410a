"""Tensors of other engines on a GPU, which are kept until the kernels that read them are done.

PyTorch releases the memory of a tensor from DLPack when nothing in Python refers to it. Kernels may be queued then, and
the other engine would write to the memory that they are about to read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import get_ident
from typing import Any

from headrace import DeviceTensor, StackedTensors
from headrace_torch.torch_tensors import TorchTensor


class Borrowed:
    """``tensors`` that kernels read until the CUDA event ``complete``.

    Results of these kernels refer to it. A reader of a result waits for the event, so nothing is left to do when the
    last result is released. Tensors whose results were not read are kept until another execution.
    """

    __slots__ = ("complete", "tensors")

    def __init__(self, complete: Any, tensors: Iterable[DeviceTensor]) -> None:
        self.complete, self.tensors = complete, tensors

    def __del__(self) -> None:
        if not self.complete.query():
            _unread.append((self.complete, self.tensors))


_unread: deque[tuple[Any, Any]] = deque()


class Borrowing:
    """The tensors that the executions of one instance borrow. False if `keep` has nothing to do. Any thread."""

    def __init__(self) -> None:
        self._by_thread: dict[int, list[DeviceTensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_thread or _unread)

    def add(self, tensor: Any) -> None:
        """Record that the execution on this thread reads ``tensor``, if it is of another engine, or has such parts."""
        for each in tensor.parts if isinstance(tensor, StackedTensors) else [tensor]:
            if isinstance(each, DeviceTensor) and not isinstance(each, TorchTensor):
                self._by_thread.setdefault(get_ident(), []).append(each)

    def keep(self, stream: Any, results: Iterable[Any]) -> None:
        """Keep the tensors added on this thread until ``stream`` has done its present work, the ``results``."""
        while _unread and _unread[0][0].query():
            _unread.popleft()
        tensors = self._by_thread.pop(get_ident(), None)
        if tensors:
            borrowed = Borrowed(stream.record_event(), tensors)
            for each in results:
                if isinstance(each, TorchTensor):
                    each.borrowed = borrowed
