"""The instance of a model that generates text: a queue, and a thread for each slot of llama.cpp.

llama.cpp would take any number of requests in the order of their arrival, with a thread for each. So a request waits
here until a slot is free. The one with the best priority is next. If its caller disconnects first, it takes no slot.
"""

from __future__ import annotations

import heapq
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

from headrace import BackendError, Cancelled, HeadraceError, InvalidArgument, Model
from headrace_llamacpp.chunks import ChunkReader
from headrace_llamacpp.constraints import Constraints, TextGuard, grammar_of
from headrace_llamacpp.llama_bodies import ModelLimits, body_of
from headrace_llamacpp.llama_server import ModelFiles, context_of
from headrace_llamacpp.parameters import Parameters
from headrace_llamacpp.template_checks import TemplateChecks
from headrace_llm import GenerationInstance, GenerationRequest, ImageBudget, StopStrings, TokenStream, images_in

log = logging.getLogger("headrace.llamacpp")

#: The forms of images that a model reads. llama.cpp would read others, and audio, in the place of an image.
IMAGE_FORMS: Final = ("PNG", "JPEG", "GIF", "BMP")
#: A running request updates the metric of the cache each time it has this many tokens more.
_USAGE_STEP: Final = 16
#: The place of a request without a priority: after all others.
_NO_PRIORITY: Final = 1 << 32


@dataclass(order=True, slots=True)
class _Waiting:
    """A request that waits for a slot. Ordered by priority, then by arrival."""

    priority: int
    number: int
    stream: TokenStream = field(compare=False)
    body: dict[str, Any] = field(compare=False)


class LlamaInstance(GenerationInstance):
    """Runs requests on ``engine``, an ``xllamacpp.Server``, at most as many at once as it has slots.

    ``templates`` renders each chat before the engine does; None if the model has no chat template.
    """

    def __init__(self, model: Model, engine: Any, files: ModelFiles, templates: TemplateChecks | None) -> None:
        parameters: Parameters = model.parameters
        super().__init__(model, parameters.max_streams)
        self._engine = engine
        self._limits = ModelLimits(model.name, context_of(parameters, files.header), files)
        self._constraints, self._templates = Constraints(files.header.has_space_prefix), templates
        self._queue: list[_Waiting] = []
        #: The requests that run, and the tokens of the cache.
        self._running: dict[_SlotRun, None] = {}
        self._cache_tokens = parameters.slots * self._limits.context
        self._numbers = count()
        self._is_closed = False
        #: Guards the queue. Notified for each request, and for the end.
        self._arrival = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"{model.name} slot {number}", daemon=True)
            for number in range(parameters.slots)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, request: GenerationRequest, stream: TokenStream) -> None:
        body = body_of(request, self._limits, grammar_of(request.sampling.structured))
        with self._arrival:
            heapq.heappush(self._queue, _Waiting(request.priority or _NO_PRIORITY, next(self._numbers), stream, body))
            self._arrival.notify()

    def cancel(self, stream: TokenStream) -> None:
        """Take ``stream`` from the queue. If it runs, it ends with the next token, or the next part of the prompt."""
        with self._arrival:
            self._queue = [each for each in self._queue if each.stream is not stream]
            heapq.heapify(self._queue)

    def close(self) -> None:
        with self._arrival:
            self._is_closed = True
            self._queue.clear()
            self._arrival.notify_all()
        super().close()
        for thread in self._threads:
            thread.join()
        self._constraints.close()
        if self._templates is not None:
            self._templates.close()
        self._engine = None  # its end

    def _work(self) -> None:
        while True:
            with self._arrival:
                while not self._queue and not self._is_closed:
                    self._arrival.wait()
                if self._is_closed:
                    return
                waiting = heapq.heappop(self._queue)
            self._run(waiting.stream, waiting.body)
            del waiting

    def _run(self, stream: TokenStream, body: dict[str, Any]) -> None:
        try:
            if stream.is_cancelled:
                raise Cancelled("the caller has disconnected")
            stream.note_start()
            ImageBudget(IMAGE_FORMS).take(images_in(stream.request))
            if self._templates is not None and "messages" in body:
                self._templates.check(body)
            run = _SlotRun(stream, self._engine, self._constraints, body, self._note_usage)
            self._running[run] = None
            try:
                run.run()
            finally:
                del self._running[run]
                self._note_usage()
        except HeadraceError as error:
            stream.fail(error)
        except Exception as error:
            log.exception("a request to llama.cpp failed")
            stream.fail(BackendError(f"llama.cpp: {type(error).__name__}: {error}"))

    def _note_usage(self) -> None:
        """Record the part of the cache that the running requests use. Entries that llama.cpp keeps of earlier ones
        count as free.
        """
        used = sum(run.num_tokens for run in tuple(self._running))
        self.metrics.note_cache_usage(min(1.0, used / self._cache_tokens))


class _SlotRun:
    """One request on llama.cpp: from its chunks to its stream."""

    def __init__(
        self,
        stream: TokenStream,
        engine: Any,
        constraints: Constraints,
        body: dict[str, Any],
        note_usage: Callable[[], None],
    ) -> None:
        self._stream, self._engine, self._body, self._note_usage = stream, engine, body, note_usage
        self._reader = ChunkReader(stream.request.sampling.logprobs or 0)
        self._error: HeadraceError | None = None
        self._has_begun = self._has_ended = False
        #: llama.cpp would lose the text that may begin a stop string if the answer ends by its length.
        self._stops = StopStrings(stream.request.sampling.stop)
        self._guard: TextGuard | None = None
        if grammar := body.get("grammar"):
            constraints.check(grammar)
            self._guard = constraints.guard(grammar)

    @property
    def num_tokens(self) -> int:
        """The tokens of the prompt and of the answer so far."""
        return self._reader.num_input_tokens + self._reader.num_output_tokens

    def run(self) -> None:
        """Block until the answer has ended. Raises `HeadraceError` if it fails."""
        is_chat = "messages" in self._body
        handle = self._engine.handle_chat_completions if is_chat else self._engine.handle_completions
        try:
            handle(self._body, self._take)
        except (RuntimeError, TypeError, ValueError) as error:  # the body is checked before the first chunk
            if self._has_begun:
                raise
            raise InvalidArgument(f"llama.cpp: {str(error)[:500]}") from None
        if self._error is not None:
            raise self._error
        if not self._has_ended and not self._stream.is_cancelled:
            raise BackendError("llama.cpp ended an answer without its end")

    def _take(self, chunk: dict[str, Any]) -> bool:
        """Take one chunk. Return True to stop. An exception would be lost in llama.cpp."""
        self._has_begun = True
        try:
            delta = self._reader.read(chunk)
            if self._guard is not None:
                self._guard.add(delta.text)
                if delta.finish_reason == "stop":
                    self._guard.end()
            delta.text = self._stops.feed(delta.text)
            if self._stops.has_stopped:
                delta.finish_reason = "stop"
            elif delta.finish_reason:
                delta.text += self._stops.rest()
        except HeadraceError as error:
            self._error = error
            return True
        except Exception as error:
            log.exception("a chunk of llama.cpp cannot be read")
            self._error = BackendError(f"llama.cpp: {type(error).__name__}: {error}")
            return True
        if delta.num_input_tokens or not self._reader.num_output_tokens % _USAGE_STEP:
            self._note_usage()
        self._has_ended = bool(delta.finish_reason)
        return not self._stream.write(delta) or self._stops.has_stopped
