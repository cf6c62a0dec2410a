"""Runs the warm-up requests of a config in a child that nobody pulls batches for yet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.errors import HeadraceError, InternalError, Unavailable
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.workers.process.child import Child
from headrace.workers.process.wire.answers import Times
from headrace.workers.warmup import Sample


class Rehearsal:
    """The owner of a child until it is warmed up. Event loop only."""

    def __init__(self) -> None:
        self._waiting: set[InferRequest] = set()
        self._problem: HeadraceError | None = None
        self._done = asyncio.Event()

    async def run(self, child: Child, sample: Sample, instance: str) -> None:
        """Execute ``sample`` on ``instance``; raises `InternalError` naming it if any request fails."""
        for number in range(sample.count):
            sample.tell(instance, number + 1)
            self.require_life(child)
            self._waiting = set(sample.requests)
            self._done.clear()
            child.traffic.run(sample.requests)
            await self._done.wait()
            if self._problem is not None:
                raise InternalError(f"failed to run warmup sample '{sample.name}': {self._problem.message}; ")

    def require_life(self, child: Child) -> None:
        """Raise `InternalError` if ``child`` has died since it was loaded."""
        if child.is_dead and self._problem is not None:
            raise InternalError(self._problem.message)

    def batch_done(self, requests: Sequence[InferRequest], answers: Sequence[Answer], times: Times) -> None:
        for request, answer in zip(requests, answers, strict=True):
            self.answered(request, answer, True)

    def answered(self, request: InferRequest, answer: Answer, final: bool) -> None:
        if isinstance(answer, HeadraceError):
            self._problem = answer
        if final:
            self._waiting.discard(request)
        if not self._waiting:
            self._done.set()

    def child_died(self, child: Child, reason: str) -> None:
        self._problem = Unavailable(reason)
        self._done.set()
