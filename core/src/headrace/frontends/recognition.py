"""Recognizing what came before: clients repeat themselves, and what was read once need not be read again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.messages.request import InferRequest, Parameter

#: Layouts that a protocol keeps, and the bytes besides tensors that a request may have whose layout is kept.
LAYOUTS = 1024
FIXED_BYTES = 1024
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
    if request.id:
        return None
    tensors = {name: tensor for name, tensor in request.inputs.items() if isinstance(tensor, np.ndarray)}
    if len(tensors) < len(request.inputs) or not all(tensor.nbytes for tensor in tensors.values()):
        return None  # strings have another length each time
    return tensors


class TensorPlace(NamedTuple):
    """An input, and where in a body its bytes begin."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    begin: int


class RequestLayout(NamedTuple):
    """What requests have in common that differ in the bytes of their tensors only.

    A client that sends tensors of one shape sends such requests. What was read out of one is kept, and of the next only
    the tensors are read. How a request is told to be one of them is its protocol's affair.
    """

    places: Sequence[TensorPlace]
    outputs: Sequence[str]
    parameters: Mapping[str, Parameter]
    priority: int
    timeout_us: int
    #: Its id, and whether it begins and ends with such a request; None for one that is of no sequence.
    sequence: tuple[int | str, bool, bool] | None

    @classmethod
    def of(cls, request: InferRequest, tensors: Mapping[str, npt.NDArray[Any]], begins: Iterable[int]) -> RequestLayout:
        """The layout of ``request``, whose inputs are ``tensors``, which begin at ``begins``."""
        places = [
            TensorPlace(name, tensor.shape, tensor.dtype, begin)
            for (name, tensor), begin in zip(tensors.items(), begins, strict=True)
        ]
        sequence = (request.sequence_id, request.sequence_start, request.sequence_end)
        outputs, parameters = tuple(request.outputs), dict(request.parameters)
        return cls(
            places,
            outputs,
            parameters,
            request.priority,
            request.timeout_us,
            sequence if request.is_in_sequence else None,
        )

    def request(
        self, model: str, version: str, body: bytes | memoryview, forwarded: Mapping[str, Parameter] | None = None
    ) -> InferRequest:
        """The request to ``model`` that ``body`` is; its inputs are views on ``body``."""
        inputs = {name: np.ndarray(shape, dtype, body, begin) for name, shape, dtype, begin in self.places}
        # Its own, whatever a careless model does with it.
        parameters = {**self.parameters, **forwarded} if forwarded else {**self.parameters}
        if self.sequence is None:
            return InferRequest(model, inputs, self.outputs, "", version, parameters, self.priority, self.timeout_us)
        return InferRequest(
            model, inputs, self.outputs, "", version, parameters, self.priority, self.timeout_us, *self.sequence
        )
