"""The built-in schedulers: the dynamic batcher, and `DirectScheduler`, which runs batches of one request.

An idle instance pulls a batch. `decide` determines when a batch is sent, by arithmetic on the waiting requests only.
`QueuePolicy` limits how long a request may wait, and how many may wait with it.

Source: docs/spec/behaviours.md sections 6.1 to 6.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from headrace.backends.cores import available_cores
from headrace.config.model_config_pb2 import ModelConfig, ModelQueuePolicy
from headrace.errors import Unavailable
from headrace.messages.ticket import ReasonedBatch, Ticket
from headrace.schedulers.base import FullScheduler, InstanceInfo, SchedulerContext, Wait
from headrace.telemetry.batch_history import (
    DEADLINE,
    DELAY,
    DIVIDED,
    FULL,
    IDLE_INSTANCE,
    PREFERRED_SIZE,
    SHAPE_BREAK,
)

#: Executions shorter than 1 ms are not divided: waking threads and running bytecode would cost a good part of the gain.
WORTH_DIVIDING_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """The limits of one level. ``default_timeout_ns`` and ``max_size`` are 0 for no limit.

    If ``postpones``, an expired request moves behind the others instead of being rejected.
    """

    default_timeout_ns: int = 0
    allows_override: bool = False
    max_size: int = 0
    postpones: bool = False

    @classmethod
    def from_config(cls, policy: ModelQueuePolicy) -> QueuePolicy:
        return cls(
            policy.default_timeout_microseconds * 1000,
            policy.allow_timeout_override,
            policy.max_queue_size,
            policy.timeout_action == ModelQueuePolicy.DELAY,
        )

    def timeout_ns(self, requested_us: int) -> int:
        """Return the timeout of a request. Its own counts only if that is allowed, above 0 and smaller than the
        default."""
        requested_ns = requested_us * 1000
        if self.allows_override and 0 < requested_ns < self.default_timeout_ns:
            return requested_ns
        return self.default_timeout_ns


@dataclass(frozen=True, slots=True)
class Priorities:
    """The levels of a model's queue: 1 is first, at most 2^64 - 1. ``own`` has the policies that are not the
    default."""

    levels: int = 1
    default_level: int = 1
    default: QueuePolicy = QueuePolicy()
    own: Mapping[int, QueuePolicy] = field(default_factory=dict)

    @classmethod
    def from_config(cls, config: ModelConfig) -> Priorities:
        batching = config.dynamic_batching
        default = QueuePolicy.from_config(batching.default_queue_policy)
        levels = batching.priority_levels
        if not levels:
            return cls(default=default)
        own = {level: QueuePolicy.from_config(policy) for level, policy in batching.priority_queue_policy.items()}
        return cls(levels, batching.default_priority_level, default, own)

    def level(self, requested: int) -> int:
        """Return the level of a request; for 0 and for unknown levels, the default level."""
        return requested if 1 <= requested <= self.levels else self.default_level

    def policy(self, level: int) -> QueuePolicy:
        return self.own.get(level, self.default)


@dataclass(frozen=True, slots=True)
class BatchRule:
    """The rule by which requests join a batch. Both ``max_rows`` and ``max_requests`` bound it."""

    max_rows: int = 1
    max_requests: int = 1
    preferred_rows: frozenset[int] = frozenset()
    max_delay_ns: int = 0
    largest_preferred: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest_preferred", max(self.preferred_rows, default=self.max_rows))

    @classmethod
    def from_config(cls, config: ModelConfig) -> BatchRule:
        """Return the rule of ``dynamic_batching``. A model without a batch axis runs one request at a time."""
        batching, rows = config.dynamic_batching, config.max_batch_size
        if rows < 1:
            return cls()
        preferred = frozenset(batching.preferred_batch_size) or frozenset((rows,))
        return cls(rows, rows, preferred, batching.max_queue_delay_microseconds * 1000)

    def why_alone(self, rows: int) -> str:
        """Return the reason to send a single request of ``rows`` rows, for which no other is waited."""
        if rows >= self.max_rows or self.max_requests == 1:
            return FULL
        return PREFERRED_SIZE if rows in self.preferred_rows else IDLE_INSTANCE


class Decision(NamedTuple):
    """Send the first ``requests`` now, which have ``rows`` rows, for ``reason``.

    If ``requests`` is 0, decide again after ``wait_ns``, or when ``missing_rows`` more have arrived.
    """

    requests: int
    wait_ns: int = 0
    missing_rows: int = 0
    rows: int = 0
    reason: str = ""


def decide(waiting: Sequence[Ticket], rule: BatchRule, now_ns: int) -> Decision:
    """Decide about ``waiting``: at least one request, in the order of service."""
    if len(waiting) == 1 and not rule.max_delay_ns:  # one request, and no reason to wait for more
        return Decision(1, 0, 0, waiting[0].rows, rule.why_alone(waiting[0].rows))
    rows = preferred = preferred_at = count = 0
    key, complete = waiting[0].batch_key, ""
    most, preferred_rows = rule.max_rows, rule.preferred_rows
    for ticket in waiting:
        joined = rows + ticket.rows
        if count and (joined > most or ticket.batch_key != key):
            complete = FULL if joined > most else SHAPE_BREAK
            break
        rows = joined
        count += 1
        if rows in preferred_rows:
            preferred, preferred_at = count, rows
    if rows >= most or count >= rule.max_requests:
        complete = FULL
    why_preferred = FULL if preferred_at >= most else PREFERRED_SIZE
    if not rule.max_delay_ns:
        if preferred:
            return Decision(preferred, 0, 0, preferred_at, why_preferred)
        return Decision(count, 0, 0, rows, complete or IDLE_INSTANCE)
    waited_ns = now_ns - min([ticket.queued_ns for ticket in waiting[:count]])
    if waited_ns >= rule.max_delay_ns:
        return Decision(count, 0, 0, rows, complete or DELAY)
    if preferred:
        return Decision(preferred, 0, 0, preferred_at, why_preferred)
    if rows > rule.largest_preferred:
        return _below(waiting, rule.largest_preferred)
    if complete or rows == rule.largest_preferred:
        return Decision(count, 0, 0, rows, complete or FULL)
    target = min(size for size in rule.preferred_rows | {rule.max_rows} if size > rows)
    return Decision(0, rule.max_delay_ns - waited_ns, target - rows)


def _below(waiting: Sequence[Ticket], largest: int) -> Decision:
    """Return a decision for as many of ``waiting`` as fit into ``largest`` rows, and for at least one.

    The rows above the largest preferred size stay for the next batch.
    """
    rows = count = 0
    for ticket in waiting:
        if count and rows + ticket.rows > largest:
            break
        rows += ticket.rows
        count += 1
    return Decision(count, 0, 0, rows, FULL)


class DynamicScheduler(FullScheduler):
    """Batches requests that wait together, by the config's ``dynamic_batching``.

    If the config has neither preferred sizes nor a delay, and executions are long, instances on the CPU, and several
    calls of one instance, share the requests in flight evenly. Otherwise the first one would run them all.
    """

    name: ClassVar[str] = "dynamic_batching"
    on_threads = True
    instances_alike = True
    #: True if a test of the server may delay this scheduler (`headrace.DelayedStart`).
    _may_be_delayed: ClassVar[bool] = True

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.keeps_order = context.config.dynamic_batching.preserve_ordering
        self._rule = rule = self.rule(context)
        # True if the config has a delay or preferred sizes. Every completed config prefers the maximum.
        has_rule = rule.max_delay_ns or rule.preferred_rows - {rule.max_rows}
        self._shares_evenly = rule.max_requests > 1 and not has_rule
        #: True if a single request runs without waiting for others.
        self._takes_alone = rule.max_requests > 1 and not rule.max_delay_ns
        self._cores = available_cores()
        self._waiting = context.waiting
        self._priorities = Priorities.from_config(context.config)
        policy = self._priorities.policy(1)
        has_levels = self._priorities.levels > 1
        self._has_limits = bool(has_levels or policy.max_size or policy.default_timeout_ns)
        #: True if a request may have a deadline: by the config, or by a class that overrides `submit`.
        self._has_deadlines = self._has_limits or type(self).submit is not DynamicScheduler.submit
        if not (self._has_deadlines or rule.max_delay_ns):
            self.submit = super().submit  # type: ignore[method-assign]  # there is nothing to do
        #: True if each new request is placed behind all others. Levels and postponed requests break this.
        self._arrives_last = not (has_levels or policy.postpones)
        self._forming_key: object = None
        #: ``_is_forming``: a batch is forming. ``_has_expired``: a request of it has expired since, so that the rest
        #: may now be complete as a batch.
        self._is_forming = self._has_expired = False
        if context.delayed_start.requests and self._may_be_delayed:
            self._is_delayed = True
            self.next = self._next_after_delay  # type: ignore[method-assign]  # a server that is not tested has no such step

    def rule(self, context: SchedulerContext) -> BatchRule:
        """Return the rule by which requests join. Other schedulers with a queue override this."""
        return BatchRule.from_config(context.config)

    def submit(self, ticket: Ticket) -> int | None:
        if self._rule.max_delay_ns and (ticket.batch_key != self._forming_key or not self._arrives_last):
            self.context.ask_again()  # the request may complete the forming batch by not fitting into it
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
        most = rule.max_requests
        head = queue.head(most)
        if len(head) == 1 and self._takes_alone and not head[0].deadline_ns:
            batch = ReasonedBatch(head)
            batch.rows = rows = head[0].rows
            batch.reason = rule.why_alone(rows)
            return batch
        if self._shares_evenly:
            most = min(most, self._share(instance))
            head = head[:most]
        waiting: Sequence[Ticket] = head
        if self._has_deadlines:  # a request past its deadline is skipped: its timer is about to answer it
            waiting = [ticket for ticket in head if not 0 < ticket.deadline_ns <= now_ns]
            if len(waiting) < len(head):  # their places go to the requests behind them
                waiting = [ticket for ticket in queue if not 0 < ticket.deadline_ns <= now_ns][:most]
        if not waiting or rule.max_requests == 1:
            return waiting
        count, wait_ns, missing_rows, rows, reason = decide(waiting, rule, now_ns)
        if count:
            if self._is_forming:
                reason = DEADLINE if self._has_expired and reason != DELAY else reason
                self._is_forming = self._has_expired = False
            elif reason == IDLE_INSTANCE and count == most < len(queue):
                reason = DIVIDED
            batch = ReasonedBatch(waiting if count == len(waiting) else waiting[:count])
            batch.reason, batch.rows = reason, rows
            return batch
        self._forming_key, self._is_forming, self._has_expired = waiting[0].batch_key, True, False
        return Wait(wait_ns, missing_rows)

    def _share(self, instance: InstanceInfo) -> int:
        """Return how many requests ``instance`` may take now, so that every idle core gets an equal share. Any
        thread."""
        occupancy = self.context.occupancy
        if occupancy.last_ns < WORTH_DIVIDING_NS:
            return self._rule.max_requests
        if instance.device.kind != "cpu" and occupancy.at_once <= len(self.context.instances):
            return self._rule.max_requests
        parts = max(1, min(occupancy.at_once, self._cores))  # ``at_once`` is 0 while the last instance is removed
        return max(1, -(-occupancy.in_flight // parts))

    def _next_after_delay(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        """Return nothing until enough requests wait (`headrace.DelayedStart`), then do as `next`."""
        self._is_delayed = self._is_delayed and len(self._waiting) < self.context.delayed_start.requests
        return () if self._is_delayed else DynamicScheduler.next(self, instance, now_ns)

    def expired(self, ticket: Ticket) -> int | None:
        self._has_expired = self._is_forming
        level = self._priorities.level(ticket.request.priority)
        return level if self._priorities.policy(level).postpones else None


class DirectScheduler(DynamicScheduler):
    """The default: an idle instance runs the oldest request. Requests never share an execution."""

    name: ClassVar[str] = "direct"
    _may_be_delayed = False  # in Triton, such a model has no batcher that could be delayed

    def rule(self, context: SchedulerContext) -> BatchRule:
        # A request may have many rows; only the number of requests is limited.
        return BatchRule(max_rows=max(1, context.config.max_batch_size), max_requests=1)
