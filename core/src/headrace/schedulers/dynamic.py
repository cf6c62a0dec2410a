"""The built-in schedulers: the dynamic batcher, and `DirectScheduler`, which is the same with batches of one request.

An idle instance pulls a batch. When it fires is `decide`'s to say, by arithmetic on the requests that wait and nothing
else; how long a request may wait, and how many with it, is said by its `QueuePolicy`. Source:
docs/spec/behaviours.md sections 6.1 to 6.3.
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

#: Executions that take less are not worth dividing: what each of them costs besides, in threads that wake and in
#: bytecode, is a good part of that.
WORTH_DIVIDING_NS = 1_000_000


@dataclass(frozen=True, slots=True)
class QueuePolicy:
    """``default_timeout_ns`` and ``max_size`` are 0 for none. ``postpones``: an expired request
    moves behind the others instead of being rejected."""

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
        """The timeout of a request; its own counts only if allowed, set and smaller."""
        requested_ns = requested_us * 1000
        if self.allows_override and 0 < requested_ns < self.default_timeout_ns:
            return requested_ns
        return self.default_timeout_ns


@dataclass(frozen=True, slots=True)
class Priorities:
    """The levels of a model's queue, 1 first, up to 2^64 - 1 of them; ``own`` are the policies beside the default."""

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
        """The level of a request; 0 and levels that do not exist mean the default."""
        return requested if 1 <= requested <= self.levels else self.default_level

    def policy(self, level: int) -> QueuePolicy:
        return self.own.get(level, self.default)


@dataclass(frozen=True, slots=True)
class BatchRule:
    """How requests join. ``max_requests`` bounds a batch as ``max_rows`` does."""

    max_rows: int = 1
    max_requests: int = 1
    preferred_rows: frozenset[int] = frozenset()
    max_delay_ns: int = 0
    largest_preferred: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "largest_preferred", max(self.preferred_rows, default=self.max_rows))

    @classmethod
    def from_config(cls, config: ModelConfig) -> BatchRule:
        """The rule that ``dynamic_batching`` states; a model without batch axis runs one by one."""
        batching, rows = config.dynamic_batching, config.max_batch_size
        if rows < 1:
            return cls()
        preferred = frozenset(batching.preferred_batch_size) or frozenset((rows,))
        return cls(rows, rows, preferred, batching.max_queue_delay_microseconds * 1000)


class Decision(NamedTuple):
    """Send the first ``requests`` now, which are ``rows``, for ``reason``; if that is 0, look again after
    ``wait_ns``, or as soon as ``missing_rows`` more have arrived."""

    requests: int
    wait_ns: int = 0
    missing_rows: int = 0
    rows: int = 0
    reason: str = ""


def decide(waiting: Sequence[Ticket], rule: BatchRule, now_ns: int) -> Decision:
    """What to do about ``waiting``: at least one request, in the order they would be served."""
    if len(waiting) == 1 and not rule.max_delay_ns:  # nobody to join, and nothing to wait for
        rows = waiting[0].rows
        alone = PREFERRED_SIZE if rows in rule.preferred_rows else IDLE_INSTANCE
        return Decision(1, 0, 0, rows, FULL if rows >= rule.max_rows or rule.max_requests == 1 else alone)
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
    """As many of ``waiting`` as stay within ``largest`` rows, but the first in any case: what would lift the
    batch above the largest preferred size is left for the next one."""
    rows = count = 0
    for ticket in waiting:
        if count and rows + ticket.rows > largest:
            break
        rows += ticket.rows
        count += 1
    return Decision(count, 0, 0, rows, FULL)


class DynamicScheduler(FullScheduler):
    """Batches requests that wait together, under the config's ``dynamic_batching``.

    Where that says neither preferred sizes nor a delay, instances on the CPU divide among them what is in flight, if
    executions are long: else the first that is idle would run it all while cores have nothing to do.
    """

    name: ClassVar[str] = "dynamic_batching"
    on_threads = True
    instances_alike = True
    #: Whether a test of the server may hold it (`headrace.HeldUntil`).
    _may_be_held: ClassVar[bool] = True

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.keeps_order = context.config.dynamic_batching.preserve_ordering
        self._rule = rule = self.rule(context)
        is_told = rule.max_delay_ns or rule.preferred_rows - {rule.max_rows}  # the size of all is put into each config
        self._divides = rule.max_requests > 1 and not is_told
        self._cores = available_cores()
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
        #: Whether a batch is being formed, and the time of a request is over since: who stays may be a batch for that.
        self._is_forming = self._has_expired = False
        if context.held_until.requests and self._may_be_held:
            self._held = True
            self.next = self._next_if_free  # type: ignore[method-assign]  # a server that is not tested has no such step

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
        most = min(rule.max_requests, self._share(instance)) if self._divides else rule.max_requests
        head = queue.head(most)
        waiting = [ticket for ticket in head if not 0 < ticket.deadline_ns <= now_ns]
        if len(waiting) < len(head):  # their places are for those behind them
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
        """The requests in flight that ``instance`` may run at once, so that as many others as there are cores for have
        as much to run. Any thread."""
        occupancy = self.context.occupancy
        if occupancy.last_ns < WORTH_DIVIDING_NS or instance.device.kind != "cpu":
            return self._rule.max_requests
        parts = max(1, min(occupancy.at_once, self._cores))  # none are counted while the last instance leaves
        return max(1, -(-occupancy.in_flight // parts))

    def _next_if_free(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        """`next`, once as many requests have waited at once as the server is held until."""
        self._held = self._held and len(self._waiting) < self.context.held_until.requests
        return () if self._held else DynamicScheduler.next(self, instance, now_ns)

    def expired(self, ticket: Ticket) -> int | None:
        self._has_expired = self._is_forming
        level = self._priorities.level(ticket.request.priority)
        return level if self._priorities.policy(level).postpones else None


class DirectScheduler(DynamicScheduler):
    """The default: first come, first served by any free instance; requests never share an execution."""

    name: ClassVar[str] = "direct"
    _may_be_held = False  # in Triton such a model has no batcher to hold

    def rule(self, context: SchedulerContext) -> BatchRule:
        # A request may carry many rows of its own; only the number of requests is limited.
        return BatchRule(max_rows=max(1, context.config.max_batch_size), max_requests=1)
