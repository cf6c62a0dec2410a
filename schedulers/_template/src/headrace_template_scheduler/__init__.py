"""The scheduler ``template`` for Headrace: small requests first, without letting large ones starve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace import InferRequest, InstanceInfo, Scheduler, SchedulerContext, Wait, hookimpl


@dataclass(frozen=True, slots=True)
class Parameters:
    patience_us: int = 100_000  #: who has waited so long goes before all who have not


class Template(Scheduler):
    name = "template"
    Parameters = Parameters

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self._patience_ns = context.parameters.patience_us * 1000

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[InferRequest] | Wait:
        """As many of those that wait as fit, the smallest first."""
        batch: list[InferRequest] = []
        rows = 0
        for request in sorted(self.context.waiting, key=lambda each: self._rank(each, now_ns)):
            stacks = not batch or request.batch_key == batch[0].batch_key
            if stacks and rows + request.rows <= instance.slots:
                batch.append(request)
                rows += request.rows
        return batch

    def _rank(self, request: InferRequest, now_ns: int) -> tuple[bool, int]:
        is_patient = now_ns - request.queued_ns < self._patience_ns
        return is_patient, request.rows if is_patient else request.queued_ns


@hookimpl
def register_schedulers() -> list[type[Scheduler]]:
    return [Template]
