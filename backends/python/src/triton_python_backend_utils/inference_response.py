"""Answers: one of a model, outputs or an error, and those of a decoupled model to a request that a model made.

Source: docs/spec/behaviours.md sections 9.2 and 9.5.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from headrace import Answer, HeadraceError, InferResponse, Ticket
from triton_python_backend_utils.attributes import Parameter, checked
from triton_python_backend_utils.error import TritonError, TritonModelException
from triton_python_backend_utils.named_tensor import Tensor, read_only

if TYPE_CHECKING:
    from headrace import Services


class InferenceResponse:
    """``output_tensors``, or ``error``, which goes before them. ``parameters`` go to the caller.

    Raises `TritonModelException` for an output that is None, and for a parameter that is no bool, int or str;
    TypeError for what is no tensor and no error.
    """

    __slots__ = ("__weakref__", "_error", "_outputs", "_parameters")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._outputs = outputs = list(output_tensors)
        self._error = error
        self._parameters = {} if parameters is None else checked(parameters)
        for tensor in outputs:
            if not isinstance(tensor, Tensor):
                raise _no_tensor(tensor)
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"the error of an InferenceResponse must be a TritonError, found '{type(error).__name__}'")

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """The parameters as JSON text."""
        return json.dumps(self._parameters)

    def _message(self) -> InferResponse | HeadraceError:
        """What is sent. Raises `TritonModelException` for a tensor on a device that cannot be copied to the host."""
        if self._error is not None:
            return self._error._as_headrace()
        return InferResponse({tensor._name: tensor._wire() for tensor in self._outputs}, self._parameters)

    @classmethod
    def _received(cls, answer: InferResponse | HeadraceError | None, is_shared: bool = False) -> InferenceResponse:
        """The answer of another model, in memory of that model's if it ``is_shared``.

        None is the end of a decoupled one: no outputs, no error.
        """
        response = cls.__new__(cls)
        response._outputs, response._error, response._parameters = [], None, {}
        if isinstance(answer, HeadraceError):
            response._error = TritonError._from_headrace(answer)
        elif answer is not None:
            outputs = answer.outputs
            if is_shared:
                outputs = {name: read_only(value) for name, value in outputs.items()}
            response._outputs = [Tensor._received(name, value) for name, value in outputs.items()]
            response._parameters = dict(answer.parameters)
        return response


def _no_tensor(value: object) -> Exception:
    if value is None:
        return TritonModelException("Output tensor for inference response should not be empty.")
    return TypeError(f"the outputs of an InferenceResponse must be Tensors, found type '{type(value).__name__}'")


class ResponseIterator:
    """Gives each response as it comes; the last may be empty. Begun anew at its end, it gives them again.

    Whoever drops it unfinished tells the model that nobody waits any more.
    """

    __slots__ = ("__weakref__", "_answers", "_finished", "_given", "_position", "_services", "_ticket")

    def __init__(self, services: Services, ticket: Ticket, answers: SimpleQueue[tuple[Answer, bool]]) -> None:
        self._services = services
        self._ticket = ticket
        self._answers = answers
        self._given: list[InferenceResponse] = []
        self._position = 0
        self._finished = False

    def __iter__(self) -> ResponseIterator:
        if self._finished and self._position == len(self._given):
            self._position = 0
        return self

    def __next__(self) -> InferenceResponse:
        """Waits for the next response."""
        if self._position == len(self._given):
            if self._finished:
                raise StopIteration
            self._take()
        response = self._given[self._position]
        self._position += 1
        return response

    def cancel(self) -> None:
        """Tell the model that no more is wanted. What it answers nevertheless is given as ever."""
        if not self._finished:
            self._services.stop(self._ticket)

    def __del__(self) -> None:
        # Perhaps as the interpreter ends; nobody could take an error.
        with suppress(Exception):
            if not self._finished:
                self._services.cancel(self._ticket)

    def _take(self) -> None:
        answer, final = self._answers.get()
        if final:
            self._finished = True
        else:
            self._services.read(self._ticket)
        self._given.append(InferenceResponse._received(answer, self._services.shares_memory))
