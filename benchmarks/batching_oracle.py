"""What dynamic batching by docs/spec/behaviours.md section 6.2 would have made of some arrivals: a simulation.

Written from that section alone, event by event, and without anything of Headrace: it says what a server that loses no
time would do. Every request has one row, and all have one shape.
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
    """The requests of each batch, by number, and when it began; how long each request waited."""

    batches: list[list[int]] = field(default_factory=list)
    began_ns: list[int] = field(default_factory=list)
    waits_ns: dict[int, int] = field(default_factory=dict)

    @property
    def mean_batch(self) -> float:
        return sum(map(len, self.batches)) / max(1, len(self.batches))

    def wait_ns(self, share: float) -> int:
        """What so large a share of the requests waited at most."""
        ordered = sorted(self.waits_ns.values())
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def simulate(arrivals_ns: Sequence[int], policy: Policy, execution_ns: Callable[[int], int]) -> Outcome:
    """Requests that come at ``arrivals_ns``, ascending; a batch of so many rows takes ``execution_ns`` of them."""
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
    """How many of those that wait are sent now; 0 to wait."""
    pending = min(len(queued_ns), policy.most)
    exceeded = now - queued_ns[0] >= policy.delay_ns
    reached = [size for size in policy.wanted if size <= pending]
    if reached and (not exceeded or not policy.delay_ns):
        return max(reached)  # 1: the largest preferred prefix
    if pending == policy.most:
        return pending  # 2: no more fit
    if exceeded:
        return pending  # 3: the oldest has waited long enough, or none has to
    return 0  # 4
