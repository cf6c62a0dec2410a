"""One answer of a model: outputs, or an error."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from headrace import HeadraceError, InferResponse
from triton_python_backend_utils.attributes import Parameter, checked
from triton_python_backend_utils.error import TritonError, TritonModelException
from triton_python_backend_utils.tensor import Tensor, read_only


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
