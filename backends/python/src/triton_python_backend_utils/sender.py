"""The response sender: any number of answers to one request, from any thread.

Source: docs/spec/behaviours.md section 9.4.
"""

from __future__ import annotations

from threading import Lock

from headrace import Answer, BackendError, Call, HeadraceError
from triton_python_backend_utils.arguments import UINT32, whole_number
from triton_python_backend_utils.attributes import TRITONSERVER_RESPONSE_COMPLETE_FINAL
from triton_python_backend_utils.error import TritonModelException
from triton_python_backend_utils.inference_response import InferenceResponse

_UNABLE = "Unable to send response. "


class InferenceResponseSender:
    """Answers one request. Any thread; the last reference to it ends the request, if nothing else did.

    The last answer goes out after every answer that was being sent when it was given, so none can
    follow it. ``_busy`` counts those, ``_end`` keeps it until then.
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
        """Give one answer; with TRITONSERVER_RESPONSE_COMPLETE_FINAL in ``flags`` it is the last.

        Blocks while the caller is too far behind; drops what comes after the caller has gone.
        Raises `TritonModelException`, and then nothing was sent.
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
        """Whether the caller has gone."""
        return self._call.request.cancelled

    def __del__(self) -> None:
        if not self._ended:
            self._finish(None if self._decoupled else self._unanswered())

    def _count(self, answers: bool, final: bool) -> bool:
        """Judge one send, under the lock; whether it ends the request."""
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
        # A model that is not decoupled has one answer, so its first is its last.
        return final if self._decoupled else answers

    def _progress(self, answer: Answer) -> None:
        try:
            self._call.send(answer, False)
        finally:
            with self._lock:
                self._busy -= 1
            self._flush()

    def _finish(self, answer: Answer, closes: bool = True) -> bool:
        """End the request with ``answer``, unless it has ended; whether this did it. Never waits for a reader.

        ``closes``: whatever the model sends from now on is refused.
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
