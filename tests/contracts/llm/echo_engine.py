"""An engine for tests: it writes the words of the prompt again and again, a word each millisecond."""

from __future__ import annotations

import os
import threading
from itertools import count

from headrace import Backend, InvalidArgument, Model, hookimpl
from headrace_llm import Delta, GenerationInstance, GenerationRequest, TokenStream, complete_generation


class Echo(Backend):
    name = "echo"

    def complete_config(self, model: Model) -> None:
        complete_generation(model.config, "image")

    def load(self, model: Model) -> EchoInstance:
        return EchoInstance(model, most_streams=64)


class EchoInstance(GenerationInstance):
    def __init__(self, model: Model, most_streams: int) -> None:
        super().__init__(model, most_streams)
        self.is_closed = threading.Event()

    def begin(self, request: GenerationRequest, stream: TokenStream) -> None:
        for name in request.sampling.more:
            raise InvalidArgument(f"sampling parameter '{name}' is not one of this engine")
        self.metrics.note_cache_usage(0.25)
        threading.Thread(target=self._write, args=(request, stream), daemon=True).start()

    def close(self) -> None:
        self.is_closed.set()
        super().close()

    def _write(self, request: GenerationRequest, stream: TokenStream) -> None:
        stream.note_start()
        words, stops, held = (request.text or "chat").split(), request.sampling.stop, ""
        if words[0] == "die":
            os._exit(7)
        if words[0] == "prefill":
            stream.note_prompt(len(words))
            while not (stream.is_cancelled or self.is_closed.wait(0.01)):
                pass
            return
        if words[0] == "priority":
            words = [str(request.priority)]
        kept = max(map(len, stops), default=1) - 1  # what may be the beginning of a stop string waits
        for place in count():
            held += f" {words[place % len(words)]}"
            reason, cut = "", max(0, len(held) - kept)
            if place + 1 == request.max_tokens:
                reason, cut = "length", len(held)
            for stop in stops:
                if stop in held:
                    reason, cut = "stop", held.index(stop)
            if not stream.write(Delta(held[:cut], 1, [place], num_input_tokens=len(words), finish_reason=reason)):
                return
            held = held[cut:]
            if reason or self.is_closed.wait(0.001):
                return


@hookimpl
def register_backends() -> list[type[Backend]]:
    return [Echo]
