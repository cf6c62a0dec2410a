"""The default scheduler: one request, one execution (docs/spec/behaviours.md section 6.1)."""

from __future__ import annotations

from typing import ClassVar

from headrace.schedulers.base import SchedulerContext
from headrace.schedulers.batching import BatchRule
from headrace.schedulers.dynamic import DynamicScheduler


class DirectScheduler(DynamicScheduler):
    """First come, first served by any free instance; requests never share an execution."""

    name: ClassVar[str] = "direct"

    def rule(self, context: SchedulerContext) -> BatchRule:
        # A request may carry many rows of its own; only the number of requests is limited.
        return BatchRule(max_rows=max(1, context.config.max_batch_size), max_requests=1)
