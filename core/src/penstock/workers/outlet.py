"""The way from the threads of an instance to the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.messages.request import InferRequest
from penstock.messages.response import Answer


class Sink(Protocol):
    """Where answers are given out, on the event loop: a scheduler."""

    def progress(self, request: InferRequest, response: Answer) -> None: ...

    def deliver(self, requests: Sequence[InferRequest], answers: Sequence[Answer]) -> None: ...


class LoopOutlet:
    """An `Outlet` to ``sink``. However much is sent before the loop looks, it is woken once.

    ``on_late`` is called on the loop for each last answer that was sent, before it is given out.
    """

    def __init__(
        self, sink: Sink, loop: asyncio.AbstractEventLoop, on_late: Callable[[InferRequest, Answer], None]
    ) -> None:
        self._sink = sink
        self._loop = loop
        self._on_late = on_late
        self._sent: deque[tuple[InferRequest, Answer, bool]] = deque()
        self._is_waking = False

    def send(self, request: InferRequest, answer: Answer, final: bool) -> None:
        self._sent.append((request, answer, final))
        if not self._is_waking:
            self._is_waking = True
            self._on_loop(self._flush)

    def deliver(self, requests: Sequence[InferRequest], answers: Sequence[Answer]) -> None:
        """Give out a batch of last answers, behind what was sent before."""
        self._on_loop(self._deliver, requests, answers)

    def _deliver(self, requests: Sequence[InferRequest], answers: Sequence[Answer]) -> None:
        self._flush()
        self._sink.deliver(requests, answers)

    def _flush(self) -> None:
        self._is_waking = False  # first: whoever sends from here on wakes the loop again
        while self._sent:
            request, answer, final = self._sent.popleft()
            if final:
                self._on_late(request, answer)
                self._sink.deliver((request,), (answer,))
            else:
                self._sink.progress(request, answer)

    def _on_loop(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            # The server has stopped without waiting for this instance; nobody is left to be answered.
