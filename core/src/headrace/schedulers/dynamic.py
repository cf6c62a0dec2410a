"""The dynamic batcher: an idle instance pulls a batch (docs/spec/behaviours.md sections 6.2 and 6.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace.errors import Unavailable
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import InstanceInfo, Scheduler, SchedulerContext, Wait
from headrace.schedulers.batching import BatchRule, decide
from headrace.schedulers.policy import Priorities


class DynamicScheduler(Scheduler):
    """Batches requests that wait together, under the config's ``dynamic_batching``."""

    name: ClassVar[str] = "dynamic_batching"
    on_threads = True
    instances_alike = True

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.keeps_order = context.config.dynamic_batching.preserve_ordering
        self._rule = self.rule(context)
        self._waiting = context.waiting
        self._priorities = Priorities.from_config(context.config)
        policy = self._priorities.policy(1)
        has_levels = self._priorities.levels > 1
        self._has_limits = bool(has_levels or policy.max_size or policy.default_timeout_ns)
        #: Whether there is more to say of a request than that it waits behind those before it.
        self._has_say = self._has_limits or bool(self._rule.max_delay_ns)
        #: What joins the batch that is being formed arrives behind it, unless levels or postponed requests
        #: give it another place.
        self._joins_behind = not (has_levels or policy.postpones)
        self._forming_key: object = None

    def rule(self, context: SchedulerContext) -> BatchRule:
        """How requests join; other queue-based schedulers override this."""
        return BatchRule.from_config(context.config)

    def submit(self, ticket: Ticket) -> int | None:
        if not self._has_say:
            return None
        if self._rule.max_delay_ns and (ticket.batch_key != self._forming_key or not self._joins_behind):
            self.context.ask_again()  # it may complete the batch that is being formed, by not joining it
        if not self._has_limits:
            return None
        level = self._priorities.level(ticket.request.priority)
        policy = self._priorities.policy(level)
        if policy.max_size and self._waiting.size(level) >= policy.max_size:
            raise Unavailable(f"{ticket.request.log_id}Exceeds maximum queue size")
        if policy.default_timeout_ns:
            ticket.deadline_ns = ticket.queued_ns + policy.timeout_ns(ticket.request.timeout_us)
        return level

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        rule, queue = self._rule, self._waiting
        # A request past its deadline is left to its timer, which is about to answer it.
        head = queue.head(rule.max_requests)
        waiting = [r for r in head if not 0 < r.deadline_ns <= now_ns]
        if len(waiting) < len(head):  # their places are for those behind them
            waiting = [r for r in queue if not 0 < r.deadline_ns <= now_ns][: rule.max_requests]
        if not waiting or rule.max_requests == 1:
            return waiting
        decision = decide(waiting, rule, now_ns)
        if decision.count:
            return waiting[: decision.count]
        self._forming_key = waiting[0].batch_key
        return Wait(decision.wait_ns, decision.missing_rows)

    def expired(self, ticket: Ticket) -> int | None:
        level = self._priorities.level(ticket.request.priority)
        return level if self._priorities.policy(level).postpones else None
