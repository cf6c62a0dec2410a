"""When a batch fires: arithmetic on the requests that wait, and nothing else.

The decision table of Triton's dynamic batcher (docs/spec/behaviours.md section 6.2), for an instance that
is idle now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages.ticket import Ticket


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


@dataclass(frozen=True, slots=True)
class Decision:
    """Send the first ``count`` requests now; if that is 0, look again after ``wait_ns``, or as
    soon as ``missing_rows`` more have arrived."""

    count: int
    wait_ns: int = 0
    missing_rows: int = 0


def decide(waiting: Sequence[Ticket], rule: BatchRule, now_ns: int) -> Decision:
    """What to do about ``waiting``: at least one request, in the order they would be served."""
    rows = preferred = count = 0
    key, complete = waiting[0].batch_key, False
    most, preferred_rows = rule.max_rows, rule.preferred_rows
    for ticket in waiting:
        joined = rows + ticket.rows
        if count and (joined > most or ticket.batch_key != key):
            complete = True
            break
        rows = joined
        count += 1
        if rows in preferred_rows:
            preferred = count
    if not rule.max_delay_ns:
        return Decision(preferred or count)
    waited_ns = now_ns - min([ticket.queued_ns for ticket in waiting[:count]])
    if waited_ns >= rule.max_delay_ns:
        return Decision(count)
    if preferred:
        return Decision(preferred)
    if rows > rule.largest_preferred:
        return Decision(_below(waiting, rule.largest_preferred))
    if complete or rows == rule.largest_preferred or count >= rule.max_requests:
        return Decision(count)
    target = min(size for size in rule.preferred_rows | {rule.max_rows} if size > rows)
    return Decision(0, rule.max_delay_ns - waited_ns, target - rows)


def _below(waiting: Sequence[Ticket], largest: int) -> int:
    """How many of ``waiting`` stay within ``largest`` rows, but the first in any case: what would lift the
    batch above the largest preferred size is left for the next one."""
    rows = count = 0
    for ticket in waiting:
        rows += ticket.rows
        if count and rows > largest:
            break
        count += 1
    return count
