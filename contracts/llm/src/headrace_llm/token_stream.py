"""The answer to one request, from the engine that generates it to its caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic_ns

from headrace import Call, Cancelled, HeadraceError, Unavailable
from headrace_llm.deltas import Delta, UsedTokens, joined, response_of
from headrace_llm.generation_metrics import GenerationMetrics
from headrace_llm.generation_request import GenerationRequest

#: Unsent parts are joined when there are this many. Joining each one at once would copy the text each time.
_MOST_UNJOINED = 64


class TokenStream:
    """The answer to one request, for the engine that generates it. Any thread, but one call at a time.

    `write` never blocks. If the caller reads more slowly than the engine writes, the parts that wait are joined. A
    `Delta` that is written belongs to the stream.
    """

    def __init__(
        self,
        call: Call,
        request: GenerationRequest,
        metrics: GenerationMetrics,
        declares_input: bool,
        forget: Callable[[TokenStream], object],
    ) -> None:
        """``forget`` is called once, when the answer ends. ``declares_input``: the model has ``num_input_tokens``."""
        self.request = request
        self._call, self._metrics, self._forget = call, metrics, forget
        self._outputs = call.request.outputs
        self._arrival_ns = self._last_ns = monotonic_ns()
        #: Parts that are written and not sent: the caller reads slowly, or gets one response.
        self._unsent: list[Delta] = [Delta(text=request.text or "")] if request.echoes_prompt else []
        #: None if neither the caller nor a quota asks for the number of tokens.
        self._usage = UsedTokens(declares_input) if request.wants_num_output_tokens else None
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
            self._metrics.note("nv_llm_input_tokens", num_input_tokens)
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
            self._metrics.note("nv_llm_queue_time_ms", max(waited_ns, 0) / 1e6)

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
                self._forget(self)
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
            self._forget(self)
            self._call.send(error, final=True)

    def check(self, now_ns: int) -> bool:
        """Return True if the engine must stop: the caller has disconnected, or the deadline has passed.

        If not, send the unsent parts, if the caller has read enough. The instance calls this at an interval.
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
        if delta.num_input_tokens:
            self.note_prompt(delta.num_input_tokens)
        else:
            delta.num_input_tokens = self._num_input_tokens
        if self._usage is not None:
            self._usage.written += delta.num_tokens
        if delta.num_tokens:
            now_ns, last_ns = monotonic_ns(), self._last_ns
            self._last_ns = now_ns
            self._metrics.note_tokens(delta.num_tokens, now_ns - last_ns, last_ns == self._arrival_ns)
