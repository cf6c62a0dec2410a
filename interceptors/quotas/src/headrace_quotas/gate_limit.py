"""The number of requests to a model that its gate admits at once. Event loop only."""

from __future__ import annotations

from collections.abc import Callable
from sys import maxsize

from headrace import ModelView

#: After more than one principal used the model, no batch waits behind the running ones for this time.
_SHARED_S = 1.0
#: Requests for this execution time may wait in the model's own queue, even if principals share the model.
_AHEAD_NS = 1_000_000
#: The maximum number of requests that are admitted because executions are short.
_MAX_AHEAD = 4096
#: The limit until an execution was measured.
_UNKNOWN = 64


class GateLimit:
    """The number of requests of one model that its gate admits.

    A second batch per instance keeps the instances busy, but doubles the wait of a request. So it is admitted only
    while one principal uses the model, or if executions are short.
    """

    __slots__ = ("_alone", "_fixed", "_shared", "_shared_until_s", "_views", "clock", "now")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self._shared_until_s = clock, 0.0
        #: The versions that got requests since `recompute`.
        self._views: dict[int, ModelView] = {}
        self.update(maxsize)

    def update(self, fixed: int) -> None:
        """Set the limit to ``fixed``. 0: compute it."""
        self._fixed = fixed
        self._alone = self._shared = self.now = fixed or _UNKNOWN

    def observe(self, view: ModelView) -> None:
        """Record that version ``view`` gets requests."""
        self._views[view.version] = view
        self._measure()

    def share(self, now_s: float) -> None:
        """Record that more than one principal uses the model."""
        self._shared_until_s, self.now = now_s + _SHARED_S, self._shared

    @property
    def is_shared(self) -> bool:
        return self._shared_until_s > self.clock()

    def recompute(self) -> bool:
        """Compute the limit again. Return False if no execution was measured yet, so it must be repeated soon."""
        is_measured = not self._views or self._measure()
        if is_measured:
            self._views = {}
        self.now = self._shared if self.is_shared else self._alone
        return is_measured

    def _measure(self) -> bool:
        """Compute the limit from the capacity of the instances. Return True if an execution was measured."""
        if self._fixed:
            return True
        capacities = [view.capacity() for view in self._views.values()]
        lasts_ns = max(view.occupancy.last_ns for view in self._views.values())
        if all(capacities):
            filled = sum(capacities)
            ahead = min(_AHEAD_NS // lasts_ns * filled, _MAX_AHEAD) if lasts_ns else _UNKNOWN
            self._shared, self._alone = filled + ahead, filled + max(ahead, filled)
        else:
            self._shared = self._alone = maxsize
        self.now = self._shared if self.is_shared else self._alone
        return lasts_ns > 0 or not all(capacities)
