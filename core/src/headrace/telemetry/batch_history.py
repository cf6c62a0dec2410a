"""Records why and when the last batches of a model ran. Each is a tuple; `BatchHistory.document` makes it readable."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, TypeAlias

#: Batches that are remembered per model version.
KEPT = 512

# Why a batch ran. A scheduler may have other reasons.
FULL = "full"
PREFERRED_SIZE = "preferred_size"
DELAY = "delay"
SHAPE_BREAK = "shape_break"
DEADLINE = "deadline"
IDLE_INSTANCE = "idle_instance"
DIVIDED = "divided"
RESOURCES = "resources"

#: A batch: when it was given to an instance (ns), the instance, the reason, requests, rows, when its first and its last
#: request were queued (ns), and how many requests were left waiting.
Closed: TypeAlias = tuple[int, str, str, int, int, int, int, int]

#: Characters of a reason that are shown.
_LONGEST = 100
#: Percentiles of the waits that are shown.
_QUANTILES = (50, 90, 99, 100)


class BatchHistory:
    """The last `KEPT` batches of a model version. Any thread may call ``add``, once per batch, and read."""

    __slots__ = ("_closed", "add")

    def __init__(self) -> None:
        self._closed = deque[Closed](maxlen=KEPT)
        self.add = self._closed.append

    def last(self) -> list[Closed]:
        """Return the remembered batches, oldest first."""
        while True:
            try:
                return list(self._closed)
            except RuntimeError:  # another thread has added a batch meanwhile
                continue

    def document(self, now_ns: int) -> dict[str, Any]:
        """Return totals and each batch, oldest first. Times are in microseconds; ages are relative to ``now_ns``."""
        closed = self.last()
        reasons = Counter(_shown(batch[2]) for batch in closed)
        sizes = Counter(batch[4] for batch in closed)
        return {
            "remembered": KEPT,
            "reasons": dict(reasons.most_common()),
            "sizes": [{"rows": rows, "batches": sizes[rows]} for rows in sorted(sizes)],
            "longest_wait_us": _quantiles([max(batch[0] - batch[5], batch[0] - batch[6]) for batch in closed]),
            "batches": [_in_words(batch, now_ns) for batch in closed],
        }


def _in_words(batch: Closed, now_ns: int) -> dict[str, Any]:
    closed_ns, instance, reason, requests, rows, first_ns, last_ns, waiting = batch
    return {
        "age_us": max(0, now_ns - closed_ns) // 1000,
        "instance": instance,
        "reason": _shown(reason),
        "requests": requests,
        "rows": rows,
        "first_wait_us": (closed_ns - first_ns) // 1000,
        "last_wait_us": (closed_ns - last_ns) // 1000,
        "waiting": waiting,
    }


def _shown(reason: object) -> str:
    """Return ``reason`` as text of at most 100 characters: the scheduler of a plugin may give anything."""
    return str(reason)[:_LONGEST] if reason else IDLE_INSTANCE


def _quantiles(waits_ns: Sequence[int]) -> dict[str, int]:
    """Return percentiles of the waits in microseconds; empty without waits."""
    ordered = sorted(waits_ns)
    return {f"p{q}": ordered[-(-len(ordered) * q // 100) - 1] // 1000 for q in _QUANTILES if ordered}
