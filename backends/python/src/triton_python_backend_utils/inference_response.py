"""The response of a model, with outputs or an error, and the sender, which sends any number of responses.

Source: docs/spec/behaviours.md sections 9.2 and 9.4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from threading import Lock

from headrace import Answer, BackendError, Call, HeadraceError, InferResponse
from triton_python_backend_utils.arguments import UINT32, whole_number
from triton_python_backend_utils.attributes import TRITONSERVER_RESPONSE_COMPLETE_FINAL, Parameter, checked
from triton_python_backend_utils.error import TritonError, TritonModelException
from triton_python_backend_utils.named_tensor import Tensor, named_among, read_only

_UNABLE = "Unable to send response. "


class InferenceResponse:
    """The outputs, or the ``error``, which takes precedence. ``parameters`` are sent to the caller.

    Raises `TritonModelException` for an output that is None, and for a parameter that is no bool, int or str;
    TypeError for an output that is no tensor and an error that is no `TritonError`.
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
        """Return the parameters as JSON text."""
        return json.dumps(self._parameters)

    def _message(self) -> InferResponse | HeadraceError:
        """Return the message to send. Raises `TritonModelException` for a tensor on a device that cannot be copied."""
        if self._error is not None:
            return self._error._as_headrace()
        return InferResponse({tensor._name: tensor._wire() for tensor in self._outputs}, self._parameters)

    @classmethod
    def _received(cls, answer: InferResponse | HeadraceError | None, is_shared: bool = False) -> InferenceResponse:
        """Return the answer of another model. If ``is_shared``, it is in that model's memory.

        None is the end of a decoupled model: no outputs, no error.
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


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the output ``name``, None if the response has no such output."""
    return named_among(inference_response.output_tensors(), name)


class InferenceResponseSender:
    """Sends the responses to one request, from any thread. When it is dropped, it ends the request if necessary.

    The last answer is sent after all answers that other threads are sending, so none can follow it. ``_busy`` counts
    these, and ``_end`` holds the last answer until then.
    """

    __slots__ = ("__weakref__", "_busy", "_call", "_closed", "_decoupled", "_end", "_ended", "_lock", "_sent")

    def __init__(self, call: Call, decoupled: bool, ended: bool = False) -> None:
        self._call = call
        self._decoupled = decoupled
        self._lock = Lock()
        self._sent = 0
        self._busy = 0
        self._end: tuple[Answer] | None = None
        self._closed = ended
        self._ended = ended

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send one response; with TRITONSERVER_RESPONSE_COMPLETE_FINAL in ``flags``, it is the last.

        Blocks while the caller has too many unread responses. Does nothing if the caller has disconnected.
        Raises `TritonModelException`, in which case nothing was sent.
        """
        flags = whole_number(flags, "flags", UINT32)
        _check(response, flags)
        answer = None if response is None else response._message()
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with self._lock:
            ends = self._count(response is not None, final)
            if not ends:
                if response is None:
                    return
                self._busy += 1
        if ends:
            self._finish(answer, closes=final)
        else:
            self._progress(answer)

    def is_cancelled(self) -> bool:
        """True if the caller has disconnected."""
        return self._call.request.cancelled

    def __del__(self) -> None:
        if not self._ended:
            self._finish(None if self._decoupled else self._unanswered())

    def _count(self, answers: bool, final: bool) -> bool:
        """Check one send, under the lock. Return True if it ends the request."""
        if not self._decoupled:
            if answers and self._sent:
                raise TritonModelException(f"{_UNABLE}Non-decoupled model cannot send more than one response.")
            if not answers and not self._sent:
                raise TritonModelException(
                    f"{_UNABLE}Non-decoupled model cannot send complete final before sending a response."
                )
        if self._closed:
            raise TritonModelException(f"{_UNABLE}Response sender has been closed.")
        self._closed = final
        self._sent += 1
        # A model that is not decoupled sends one answer, which ends the request.
        return final if self._decoupled else answers

    def _progress(self, answer: Answer) -> None:
        try:
            self._call.send(answer, False)
        finally:
            with self._lock:
                self._busy -= 1
            self._flush()

    def _finish(self, answer: Answer, closes: bool = True) -> bool:
        """End the request with ``answer``, unless it has ended. Return True if this call ended it. Never waits for a
        reader.

        ``closes``: later answers of the model are refused.
        """
        with self._lock:
            if self._ended:
                return False
            self._closed, self._ended = closes, True
            self._end = (answer,)
        self._flush()
        return True

    def _flush(self) -> None:
        with self._lock:
            if self._busy or self._end is None:
                return
            (answer,), self._end = self._end, None
        self._call.send(answer, True)

    def _unanswered(self) -> HeadraceError:
        return BackendError(f"model '{self._call.request.model_name}' released the response sender without a response")


def _check(response: InferenceResponse | None, flags: int) -> None:
    if flags not in (0, TRITONSERVER_RESPONSE_COMPLETE_FINAL):
        raise TritonModelException(f"{_UNABLE}Unsupported flag provided.")
    if response is None:
        if flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
    elif not isinstance(response, InferenceResponse):
        raise TypeError(f"send() takes an InferenceResponse or None, found type '{type(response).__name__}'")
