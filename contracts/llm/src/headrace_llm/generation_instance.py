"""The instance of an engine that generates text: from calls to streams of tokens.

An engine implements `GenerationInstance.begin` and writes to `TokenStream`::

    class Echo(GenerationInstance):
        def begin(self, request, stream):
            for word in request.text.split():
                if not stream.write(Delta(text=word, num_tokens=1)):
                    return  # the caller has disconnected
            stream.finish("stop")

This module does the rest:

- reads requests, and limits their number
- joins the parts for callers that want one response, and for slow readers: the engine never waits
- cancels the requests of callers that disconnect, and requests whose deadline has passed
- counts tokens
"""

from __future__ import annotations

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
from headrace_llm.deltas import Delta, UsedTokens, joined, response_of
from headrace_llm.generation_metrics import GenerationMetrics
from headrace_llm.generation_request import GenerationRequest, read_generation

log = logging.getLogger(__name__)

#: The interval, in seconds, of the checks for disconnected callers and passed deadlines. Metrics are written with them.
CHECK_S = 0.1
#: Unsent parts are joined when there are this many. Joining each one at once would copy the text each time.
_MOST_UNJOINED = 64


class TokenStream:
    """The answer to one request, for the engine that generates it. Any thread, but one call at a time.

    `write` never blocks. If the caller reads more slowly than the engine writes, the parts that wait are joined. A
    `Delta` that is written belongs to the stream.
    """

    def __init__(self, call: Call, request: GenerationRequest, owner: GenerationInstance) -> None:
        self.request = request
        self._call, self._owner = call, owner
        self._outputs = call.request.outputs
        self._arrival_ns = self._last_ns = monotonic_ns()
        #: Parts that are written and not sent: the caller reads slowly, or gets one response.
        self._unsent: list[Delta] = [Delta(text=request.text or "")] if request.echoes_prompt else []
        #: For a caller that is told the tokens, or pays for them.
        self._usage = UsedTokens(owner.declares_input_tokens) if request.wants_num_output_tokens else None
        if self._usage is not None:
            call.used = self._usage.response
        self._num_input_tokens = 0
        self._has_started = self._has_ended = False
        #: Held while something is sent, so that nothing follows the last answer.
        self._lock = threading.Lock()

    @property
    def is_cancelled(self) -> bool:
        """True if the answer has ended, or its caller has disconnected: the engine should stop."""
        return self._has_ended or self._call.request.cancelled

    def note_prompt(self, num_input_tokens: int) -> None:
        """Note that the engine has accepted the prompt, of this many tokens. Optional: before the first `write`.

        A caller that disconnects from now on has used them.
        """
        if not self._num_input_tokens:
            self._num_input_tokens = num_input_tokens
            self._owner.metrics.note("nv_llm_input_tokens", num_input_tokens)
            if self._usage is not None:
                self._usage.input = num_input_tokens

    def note_start(self, at_ns: int = 0) -> None:
        """Note that the engine has begun to work on the request, which waited in it until then. Optional; once.

        ``at_ns`` is the time, of `monotonic_ns`, for an engine that reports it later; 0 is now.
        """
        if not self._has_started:
            self._has_started = True
            now_ns = monotonic_ns()
            waited_ns = min(at_ns or now_ns, now_ns) - self._arrival_ns
            self._owner.metrics.note("nv_llm_queue_time_ms", max(waited_ns, 0) / 1e6)

    def write(self, delta: Delta) -> bool:
        """Send ``delta``; one with a ``finish_reason`` is the last. Return False if the engine should stop."""
        if self.is_cancelled:
            self.fail(Cancelled("the caller has disconnected"))
            return False
        if not (delta.num_tokens or delta.text or delta.finish_reason or delta.num_input_tokens or delta.tool_calls
                or delta.reasoning):  # fmt: skip
            return True
        self._count(delta)
        is_last = bool(delta.finish_reason)
        with self._lock:
            if self._has_ended:  # `fail`, meanwhile
                return False
            if is_last:  # before it is sent: its reader may send the next request at once
                self._has_ended = True
                self._owner.forget(self)
            elif not self.request.stream or self._call.would_block:
                self._unsent.append(delta)
                if len(self._unsent) >= _MOST_UNJOINED:
                    self._unsent = [joined(self._unsent)]
                return True
            self._send(delta)
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

    def check(self, now_ns: int) -> bool:
        """Return True if the engine must stop: the caller has disconnected, or the deadline has passed.

        If not, send the unsent parts, if the caller has read enough. Called every `CHECK_S`.
        """
        if self._has_ended:
            return False
        if self._call.request.cancelled:
            return True
        if 0 < self.request.deadline_ns <= now_ns:
            self.fail(Unavailable("Request timeout expired"))  # Triton's text for a queue
            return True
        if self._unsent and self.request.stream and not self._call.would_block:
            with self._lock:
                if self._unsent and not self._has_ended:
                    self._send(self._unsent.pop())
        return False

    def _send(self, delta: Delta) -> None:
        """Send the unsent parts and ``delta``. Never blocks: the last response may always be sent."""
        if self._unsent:
            delta = joined([*self._unsent, delta])
            self._unsent = []
        if self._usage is not None:
            self._usage.sent += delta.num_tokens
        self._call.send(response_of(self.request, delta, self._outputs), final=bool(delta.finish_reason))

    def _count(self, delta: Delta) -> None:
        metrics = self._owner.metrics
        if delta.num_input_tokens:
            self.note_prompt(delta.num_input_tokens)
        else:
            delta.num_input_tokens = self._num_input_tokens
        if self._usage is not None:
            self._usage.written += delta.num_tokens
        if delta.num_tokens:
            now_ns, last_ns = monotonic_ns(), self._last_ns
            self._last_ns = now_ns
            metrics.note_tokens(delta.num_tokens, now_ns - last_ns, last_ns == self._arrival_ns)


class GenerationInstance(DeferredInstance, ABC):
    """An engine that generates text. Call ``super().__init__`` first, and ``super().close()`` after the engine's end.

    ``most_streams`` is how many requests it has at once, running or waiting in the engine; more are refused
    (`ResourceExhausted`).
    """

    def __init__(self, model: Model, most_streams: int = 256) -> None:
        self._name, self._most = model.name, most_streams
        self.declares_input_tokens = any(output.name == "num_input_tokens" for output in model.config.output)
        self.metrics = GenerationMetrics(model)
        self._streams: dict[TokenStream, None] = {}
        self._closed, self._has_streams = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._check_streams, name=f"{model.name} streams", daemon=True)
        self._thread.start()

    @abstractmethod
    def begin(self, request: GenerationRequest, stream: TokenStream) -> None:
        """Give ``request`` to the engine, which writes to ``stream`` from now on, on any thread.

        Called on the instance's thread, one request after the other: return soon. Raises `HeadraceError` to refuse it.
        """

    def cancel(self, stream: TokenStream) -> None:
        """Stop the work of the engine for ``stream``: its caller has disconnected, or its deadline has passed.

        Called once per stream, at most `CHECK_S` later, on a thread of this object. The stream then ends, and its
        place is free for another request. It may have ended already. The default does nothing, which is right for an
        engine that writes every few milliseconds, because `TokenStream.write` returns False then.
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
            self._has_streams.set()
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
        """Remove ``stream``, which has ended. Any thread."""
        self._streams.pop(stream, None)

    def fail_all(self, error: HeadraceError) -> None:
        """End all streams with ``error``: the engine has crashed. Any thread."""
        for stream in tuple(self._streams):
            stream.fail(error)

    def close(self) -> None:
        self.fail_all(Unavailable(f"model '{self._name}' is being unloaded"))
        self._closed.set()
        self._has_streams.set()
        self._thread.join()
        self.metrics.close()

    def _check_streams(self) -> None:
        """Cancel streams, send unsent parts to slow readers and write metrics, until `close`. Sleep without streams."""
        while not self._closed.wait(CHECK_S):
            now_ns = monotonic_ns()
            for stream in tuple(self._streams):
                if stream.check(now_ns):
                    self._cancel(stream)
            self.metrics.publish(len(self._streams))
            if not self._streams:
                self._has_streams.clear()
                if not self._streams:  # `_accept` adds a stream, and then sets the event
                    self._has_streams.wait()
        self.metrics.publish(0)

    def _cancel(self, stream: TokenStream) -> None:
        try:
            self.cancel(stream)
        except Exception:
            log.exception("model '%s' failed to cancel a request", self._name)
        stream.fail(Cancelled("the caller has disconnected"))
