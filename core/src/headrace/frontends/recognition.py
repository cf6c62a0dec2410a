"""Recognizing what came before: clients repeat themselves, and what was read once need not be read again."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.messages.request import InferRequest

K = TypeVar("K")
V = TypeVar("V")


class Recent(dict[K, V]):
    """What was made lately of what callers chose. When it is full it starts anew, so that callers who never repeat
    themselves cost little, and keep nobody else out."""

    __slots__ = ("_most",)

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def keep(self, key: K, value: V) -> None:
        if len(self) >= self._most:
            self.clear()
        self[key] = value


def fixed_tensors(request: InferRequest) -> dict[str, npt.NDArray[Any]] | None:
    """The inputs of ``request``, if one that differs from it in their bytes only may come again; None if not."""
    if request.id or request.is_in_sequence:
        return None
    tensors = {name: tensor for name, tensor in request.inputs.items() if isinstance(tensor, np.ndarray)}
    if len(tensors) < len(request.inputs) or not all(tensor.nbytes for tensor in tensors.values()):
        return None  # strings have another length each time
    return tensors
