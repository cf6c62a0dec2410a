"""Simulates dynamic batching of given arrivals, by docs/spec/behaviours.md section 6.2.

It is written from that section only, event by event, without code of Headrace: the result of a server without any
overhead. Every request has one row, and all have the same shape.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Policy:
    """``delay_ns`` is the queue delay; ``preferred`` are sizes of batches, ``most`` rows in one if there are none."""

    most: int
    delay_ns: int = 0
    preferred: frozenset[int] = frozenset()
    instances: int = 1

    @property
    def wanted(self) -> frozenset[int]:
        return self.preferred or frozenset((self.most,))


@dataclass(slots=True)
class Outcome:
    """The requests of each batch by number, the begin of each batch, and the wait of each request."""

    batches: list[list[int]] = field(default_factory=list)
    began_ns: list[int] = field(default_factory=list)
    waits_ns: dict[int, int] = field(default_factory=dict)

    @property
    def mean_batch(self) -> float:
        return sum(map(len, self.batches)) / max(1, len(self.batches))

    def wait_ns(self, share: float) -> int:
        """Return the quantile ``share`` of the waits."""
        ordered = sorted(self.waits_ns.values())
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def simulate(arrivals_ns: Sequence[int], policy: Policy, execution_ns: Callable[[int], int]) -> Outcome:
    """Simulate requests that arrive at ``arrivals_ns``, ascending. A batch of n rows takes ``execution_ns(n)``."""
    outcome = Outcome()
    waiting: deque[int] = deque()
    coming = now = 0
    free_at = [(0, number) for number in range(policy.instances)]
    heapq.heapify(free_at)
    while coming < len(arrivals_ns) or waiting:
        free, instance = heapq.heappop(free_at)
        now = max(now, free)
        if not waiting:
            now = max(now, arrivals_ns[coming])
        while True:
            while coming < len(arrivals_ns) and arrivals_ns[coming] <= now:
                waiting.append(coming)
                coming += 1
            size = _decide([arrivals_ns[number] for number in waiting], now, policy)
            if size:
                break
            over = arrivals_ns[waiting[0]] + policy.delay_ns
            now = min(over, arrivals_ns[coming]) if coming < len(arrivals_ns) else over
        batch = [waiting.popleft() for _ in range(size)]
        outcome.batches.append(batch)
        outcome.began_ns.append(now)
        outcome.waits_ns.update({number: now - arrivals_ns[number] for number in batch})
        heapq.heappush(free_at, (now + execution_ns(size), instance))
    return outcome


def _decide(queued_ns: Sequence[int], now: int, policy: Policy) -> int:
    """Return the number of waiting requests for the next batch; 0 to wait."""
    pending = min(len(queued_ns), policy.most)
    exceeded = now - queued_ns[0] >= policy.delay_ns
    reached = [size for size in policy.wanted if size <= pending]
    if reached and (not exceeded or not policy.delay_ns):
        return max(reached)  # 1: the largest preferred prefix
    if pending == policy.most:
        return pending  # 2: the batch is full
    if exceeded:
        return pending  # 3: the delay of the oldest request is over, or there is no delay
    return 0  # 4
