"""The scheduler ``template`` for Headrace: small requests first, without letting large ones starve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace import InstanceInfo, Scheduler, SchedulerContext, Ticket, Wait, hookimpl


@dataclass(frozen=True, slots=True)
class Parameters:
    patience_us: int = 100_000  #: a request that has waited this long is before all others


class Template(Scheduler):
    name = "template"
    Parameters = Parameters

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self._patience_ns = context.parameters.patience_us * 1000

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        """Return as many waiting requests as fit, the smallest first."""
        batch: list[Ticket] = []
        rows = 0
        for ticket in sorted(self.context.waiting, key=lambda each: self._rank(each, now_ns)):
            stacks = not batch or ticket.batch_key == batch[0].batch_key
            if stacks and rows + ticket.rows <= instance.slots:
                batch.append(ticket)
                rows += ticket.rows
        return batch

    def _rank(self, ticket: Ticket, now_ns: int) -> tuple[bool, int]:
        is_patient = now_ns - ticket.queued_ns < self._patience_ns
        return is_patient, ticket.rows if is_patient else ticket.queued_ns


@hookimpl
def register_schedulers() -> list[type[Scheduler]]:
    return [Template]
