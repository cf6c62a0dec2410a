"""What a scheduler implements, and what it is given."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.telemetry.statistics import ModelStatistics
from headrace.workers.bell import Bell, LoopBell


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """What a scheduler works with. ``loop`` is the server's event loop."""

    loop: asyncio.AbstractEventLoop
    config: ModelConfig
    statistics: ModelStatistics


class Scheduler(ABC):
    """Decides which requests run together, and when. One object per model version.

    ``name`` is the field of the config's ``scheduling_choice`` that selects it; ``direct`` when
    none is set. All methods run on the event loop, except `take`.
    """

    name: ClassVar[str]

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context

    @abstractmethod
    def submit(self, request: InferRequest) -> None:
        """Own ``request`` from now on and answer it exactly once with final set.

        Who changes or delays answers clears ``respond_at_once``, which passes `deliver`.
        Raises `Unavailable`, without owning it, when full or stopping.
        """

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests submitted and not yet answered."""

    @property
    @abstractmethod
    def pending(self) -> int:
        """Requests waiting for an instance."""

    def has_waiting(self, request: InferRequest) -> bool:
        """Whether ``request`` waits for an instance. One that never says so keeps calls between
        models that wait for each other from being found."""
        return False

    @abstractmethod
    async def drain(self) -> None:
        """Refuse new requests; return when every submitted one is answered."""

    @abstractmethod
    def close(self) -> None:
        """End every `take`. Requests still waiting are answered with `Unavailable`."""

    def abandon(self) -> None:
        """`close`, when the server waits no longer: also those requests that instances have are answered,
        with `Unavailable`, and cancelled; what `progress` and `deliver` say of them later is dropped.

        A scheduler that does not override this leaves them unanswered.
        """
        self.close()

    @abstractmethod
    def take(self, bell: Bell) -> list[InferRequest] | None:
        """The next batch, owned by the caller; blocks on ``bell``. None when closed.

        Called by instance threads.
        """

    @abstractmethod
    def poll(self, bell: LoopBell) -> list[InferRequest] | None:
        """`take` for the event loop: the next batch, owned by the caller, or an empty list now.

        Then ``bell`` is rung, once, when it is worth asking again. None when closed.
        """

    @abstractmethod
    def leave(self, bell: LoopBell) -> None:
        """The worker of ``bell`` cannot poll for now; what it was rung for is another's."""

    @abstractmethod
    def progress(self, request: InferRequest, response: Answer) -> None:
        """Pass on a response that is not the last of ``request``."""

    @abstractmethod
    def deliver(self, requests: Sequence[InferRequest], answers: Sequence[Answer]) -> None:
        """Answer a batch that `take` gave out; each answer is final."""
