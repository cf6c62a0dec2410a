"""What an observer of executions implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from headrace.messages.ticket import Ticket
from headrace.telemetry.statistics import BatchTimes


class Observer(ABC):
    """Watches the executions of one model version. Chosen once per load by ``observe_model``."""

    @abstractmethod
    def batch_finished(self, succeeded: Sequence[Ticket], failed: Sequence[Ticket], times: BatchTimes) -> None:
        """One execution is over, or a late answer of one has come. Called on an instance's thread or
        on the event loop, possibly several at once: must be quick and must not block. A raise is
        logged and ignored."""
