"""The instance of an engine that generates text: from calls to streams of tokens.

An engine implements `GenerationInstance.begin` and writes to `TokenStream`::

    class Echo(GenerationInstance):
        def begin(self, request, stream):
            for word in request.text.split():
                if not stream.write(Delta(text=word, num_tokens=1)):
                    return  # nobody reads it any more
            stream.finish("stop")

This module does the rest: it reads requests, bounds how many there are, gathers the text of callers that want one
response, waits for slow readers without making the engine wait, notices callers that have left, and counts tokens.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from time import monotonic_ns

from headrace import (
    BackendError,
    Call,
    Cancelled,
    DeferredInstance,
    HeadraceError,
    InferResponse,
    Model,
    ResourceExhausted,
    Unavailable,
)
from headrace_llm.deltas import Delta, response_of
from headrace_llm.generation_metrics import GenerationMetrics
from headrace_llm.generation_request import GenerationRequest, read_generation

log = logging.getLogger(__name__)

#: How often streams are checked for callers that have left, and metrics are written, in seconds.
CHECK_S = 0.05


class TokenStream:
    """The answer to one request, for the engine that generates it. Any thread, but one call at a time.

    `write` never blocks. If the caller reads more slowly than the engine writes, the parts that wait are joined.
    """

    def __init__(self, call: Call, request: GenerationRequest, owner: GenerationInstance) -> None:
        self.request = request
        self._call, self._owner = call, owner
        self._outputs = call.request.outputs
        self._arrival_ns = self._last_ns = monotonic_ns()
        self._unsent = Delta(text=request.text or "") if request.echoes_prompt else None
        self._num_input_tokens = 0
        self._has_ended = False
        #: Guards ``_unsent`` and ``_is_sending``, which say what a thread of `_send_late` still has to do.
        self._lock = threading.Lock()
        self._is_sending = False

    @property
    def is_cancelled(self) -> bool:
        """True if nobody wants the rest: the engine should stop."""
        return self._has_ended or self._call.request.cancelled

    def write(self, delta: Delta) -> bool:
        """Send ``delta``, with the last one by its ``finish_reason``. Return False if nobody wants the rest."""
        if self.is_cancelled:
            self.fail(Cancelled("the caller has gone"))
            return False
        if not (delta.num_tokens or delta.text or delta.finish_reason or delta.num_input_tokens or delta.tool_calls):
            return True
        self._count(delta)
        is_last = bool(delta.finish_reason)
        with self._lock:
            if self._unsent is None:
                self._unsent = delta
            else:
                self._unsent.add(delta)
            if is_last:  # before it is sent: whoever has read it may send the next request
                self._has_ended = True
                self._owner.forget(self)
            if self._is_sending or not (is_last or self.request.stream):
                return True
            if not is_last and self._call.would_block:
                self._is_sending = True
                threading.Thread(target=self._send_late, name="slow reader", daemon=True).start()
                return True
            delta, self._unsent = self._unsent, None
        self._call.send(response_of(self.request, delta, self._outputs), final=is_last)
        return True

    def finish(self, reason: str) -> None:
        """End the answer: ``stop``, ``length`` or ``tool_calls``."""
        self.write(Delta(finish_reason=reason))

    def fail(self, error: HeadraceError) -> None:
        """End the answer with ``error``. Does nothing if it has ended."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
        self._owner.forget(self)
        self._call.send(error, final=True)

    def _send_late(self) -> None:
        """Send what waits, on a thread that may block, until nothing does."""
        while True:
            with self._lock:
                delta, self._unsent = self._unsent, None
                if delta is None or (self._has_ended and not delta.finish_reason):
                    self._is_sending = False
                    return
            with contextlib.suppress(BackendError):  # `fail` has sent the last answer meanwhile
                self._call.send(response_of(self.request, delta, self._outputs), final=bool(delta.finish_reason))

    def _count(self, delta: Delta) -> None:
        note = self._owner.metrics.note
        if delta.num_input_tokens and not self._num_input_tokens:
            self._num_input_tokens = delta.num_input_tokens
            note("nv_llm_input_tokens", delta.num_input_tokens)
        delta.num_input_tokens = delta.num_input_tokens or self._num_input_tokens
        if delta.num_tokens:
            now_ns, last_ns = monotonic_ns(), self._last_ns
            is_first = last_ns == self._arrival_ns
            note(
                "nv_llm_time_to_first_token_ms" if is_first else "nv_llm_time_between_tokens_ms",
                (now_ns - last_ns) / 1e6,
            )
            note("nv_llm_output_tokens", delta.num_tokens)
            self._last_ns = now_ns


class GenerationInstance(DeferredInstance, ABC):
    """An engine that generates text. Call ``super().__init__`` first, and ``super().close()`` after the engine's end.

    ``most_streams`` is how many requests it has at once, running or waiting in the engine; more are refused
    (`ResourceExhausted`).
    """

    def __init__(self, model: Model, most_streams: int = 256) -> None:
        self._name, self._most = model.name, most_streams
        self.metrics = GenerationMetrics(model)
        self._streams: dict[TokenStream, None] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name=f"{model.name} streams", daemon=True)
        self._thread.start()

    @abstractmethod
    def begin(self, request: GenerationRequest, stream: TokenStream) -> None:
        """Give ``request`` to the engine, which writes to ``stream`` from now on, on any thread.

        Called on the instance's thread, one request after the other: return soon. Raises `HeadraceError` to refuse it.
        """

    def cancel(self, stream: TokenStream) -> None:
        """The caller of ``stream`` has left: make the engine stop. Called once per stream, at most `CHECK_S` later.

        Any thread. The default does nothing, which is right for an engine that writes every few milliseconds, and so
        hears of it by `TokenStream.write`.
        """

    def accept(self, calls: Sequence[Call]) -> Sequence[InferResponse | HeadraceError | None]:
        return [self._accept(call) for call in calls]

    def _accept(self, call: Call) -> HeadraceError | None:
        if len(self._streams) >= self._most:
            return ResourceExhausted(
                f"model '{self._name}' has {len(self._streams)} requests, its limit (max_streams) is {self._most}"
            )
        stream = None
        try:
            request = read_generation(call.request)
            stream = TokenStream(call, request, self)
            self._streams[stream] = None
            self.begin(request, stream)
        except HeadraceError as error:
            return self._refused(stream, error)
        except Exception as error:
            log.exception("model '%s' failed to begin a request", self._name)
            return self._refused(stream, BackendError(f"model '{self._name}': {type(error).__name__}: {error}"))
        return None

    def _refused(self, stream: TokenStream | None, error: HeadraceError) -> HeadraceError | None:
        if stream is None:
            return error
        stream.fail(error)
        return None

    def forget(self, stream: TokenStream) -> None:
        """``stream`` has ended."""
        self._streams.pop(stream, None)

    def fail_all(self, error: HeadraceError) -> None:
        """End all streams with ``error``: the engine has died. Any thread."""
        for stream in tuple(self._streams):
            stream.fail(error)

    def close(self) -> None:
        self.fail_all(Unavailable(f"model '{self._name}' is being unloaded"))
        self._closed.set()
        self._thread.join()
        self.metrics.close()

    def _look_after(self) -> None:
        cancelled: set[TokenStream] = set()
        while not self._closed.wait(CHECK_S):
            streams = tuple(self._streams)
            for stream in streams:
                if stream.is_cancelled and stream not in cancelled:
                    cancelled.add(stream)
                    self.cancel(stream)
            cancelled.intersection_update(streams)
            self.metrics.publish(len(streams))
        self.metrics.publish(0)
