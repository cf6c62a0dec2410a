"""Chooses the target of a request.

The first that applies: the target of the request's sequence, a matching rule, the sticky key, the weights. A rolled
back target gets only the rest of its sequences; the baseline gets its other requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import fsum
from typing import Final, TypedDict

from headrace import InferRequest
from headrace_router.routing_table import RequestValue, RoutingTable
from headrace_router.splitting import Split

SEQUENCE: Final = "sequence"
RULE: Final = "rule"
STICKY: Final = "sticky"
WEIGHTS: Final = "weights"
ROLLBACK: Final = "rollback"
REASONS: Final = (SEQUENCE, RULE, STICKY, WEIGHTS, ROLLBACK)


class RolledBack(TypedDict):
    """Why a target was rolled back, and when, in seconds since 1970."""

    reason: str
    at: float


class Decider:
    """Decides by ``table``. A sequence without a request for ``idle_ns`` is removed; 0 if targets have no sequences."""

    def __init__(self, table: RoutingTable, idle_ns: int) -> None:
        self.table, self._idle_ns = table, idle_ns
        self._split = Split(table.labels, table.weights)
        self._is_plain = not (table.rules or table.sticky or idle_ns)
        #: The reason and the time of each rollback, by the label of the target. Changed by `change`.
        self.rolled_back: Mapping[str, RolledBack] = {}
        self._rolled_back: frozenset[int] = frozenset()
        #: Decisions by their reasons.
        self.counts = dict.fromkeys(REASONS, 0)
        #: The target and the time of the last request of each running sequence, oldest first.
        self._sequences: OrderedDict[int | str, tuple[int, int]] = OrderedDict()

    @property
    def configured_weights(self) -> Sequence[float]:
        """The weights that the config or a change has set."""
        return self._split.weights

    @property
    def weights(self) -> list[float]:
        """The weights in effect: those of rolled back targets are added to the baseline."""
        found = [0.0 if index in self._rolled_back else weight for index, weight in enumerate(self.configured_weights)]
        found[0] = fsum(self.configured_weights[index] for index in (0, *self._rolled_back))
        return found

    def change(self, weights: Sequence[float], rolled_back: Mapping[str, RolledBack]) -> None:
        """Decide by ``weights`` from the next request on. Sequences that run stay where they are."""
        self._split = Split(self.table.labels, weights, self._split.point)
        self.rolled_back = dict(rolled_back)
        self._rolled_back = frozenset(index for index, label in enumerate(self.table.labels) if label in rolled_back)

    def decide(self, request: InferRequest, now_ns: int) -> tuple[int, str]:
        """Return the index of the target of ``request``, and the reason."""
        if self._is_plain:
            index, why = self._split.next(), WEIGHTS
        elif self._idle_ns and request.is_in_sequence:
            return self._in_sequence(request, now_ns)
        else:
            index, why = self._choose(request)
        if index in self._rolled_back:
            index, why = 0, ROLLBACK
        self.counts[why] += 1
        return index, why

    def is_running(self, request: InferRequest) -> bool:
        """True if ``request`` belongs to a sequence that a target has."""
        return request.sequence_id in self._sequences and not request.sequence_start

    def _choose(self, request: InferRequest) -> tuple[int, str]:
        table = self.table
        for rule in table.rules:
            value = read(rule.source, request)
            if value is not None and (rule.value is None or value == rule.value):
                return rule.target, RULE
        if table.sticky is not None and (key := read(table.sticky, request)) is not None:
            return self._split.of_key(key), STICKY
        return self._split.next(), WEIGHTS

    def _in_sequence(self, request: InferRequest, now_ns: int) -> tuple[int, str]:
        sequence_id = request.sequence_id
        known = self._sequences.pop(sequence_id, None)
        if request.sequence_start:
            index, why = self._choose(request)
            if index in self._rolled_back:
                index, why = 0, ROLLBACK
            self._remove_idle(now_ns)
        else:  # the baseline refuses an unknown sequence
            index, why = known[0] if known is not None else 0, SEQUENCE
        if not request.sequence_end and (request.sequence_start or known is not None):
            self._sequences[sequence_id] = index, now_ns
        self.counts[why] += 1
        return index, why

    def _remove_idle(self, now_ns: int) -> None:
        """Forget the sequences that have ended without a last request."""
        sequences = self._sequences
        while sequences and next(iter(sequences.values()))[1] < now_ns - self._idle_ns:
            sequences.popitem(last=False)


def read(source: RequestValue, request: InferRequest) -> str | None:
    """Return the value of ``source`` in ``request``; None if it has none."""
    if source.kind == "sequence":
        return str(request.sequence_id) if request.sequence_id else None
    if source.kind == "parameter":
        value = request.parameters.get(source.name)
        return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    sender = request.sender
    return None if sender is None else sender.header(source.name)
