"""The instance of an engine that generates text: from calls to streams of tokens.

An engine implements `GenerationInstance.begin` and writes to `TokenStream`::

    class Echo(GenerationInstance):
        def begin(self, request, stream):
            for word in request.text.split():
                if not stream.write(Delta(text=word, num_tokens=1)):
                    return  # the caller has disconnected
            stream.finish("stop")

This class and `TokenStream` do the rest:

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
from headrace_llm.generation_metrics import GenerationMetrics
from headrace_llm.generation_request import GenerationRequest, read_generation
from headrace_llm.token_stream import TokenStream

log = logging.getLogger(__name__)

#: The interval, in seconds, of the checks for disconnected callers and passed deadlines. Metrics are written with them.
CHECK_S = 0.1


class GenerationInstance(DeferredInstance, ABC):
    """An engine that generates text. Call ``super().__init__`` first, and ``super().close()`` after the engine's end.

    ``most_streams`` is how many requests it has at once, running or waiting in the engine; more are refused
    (`ResourceExhausted`).
    """

    def __init__(self, model: Model, most_streams: int = 256) -> None:
        self._name, self._most = model.name, most_streams
        self._declares_input = any(output.name == "num_input_tokens" for output in model.config.output)
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
            stream = TokenStream(call, request, self.metrics, self._declares_input, self.forget)
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
                # `_accept` adds a stream and `close` sets `_closed`, and then sets the event.
                if not (self._streams or self._closed.is_set()):
                    self._has_streams.wait()
        self.metrics.publish(0)

    def _cancel(self, stream: TokenStream) -> None:
        try:
            self.cancel(stream)
        except Exception:
            log.exception("model '%s' failed to cancel a request", self._name)
        stream.fail(Cancelled("the caller has disconnected"))
