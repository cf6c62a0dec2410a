"""How many requests to a model are let in at once, from what fills its instances. Event loop only."""

from __future__ import annotations

from collections.abc import Callable
from sys import maxsize

from headrace import ModelView

#: More than one principal used the model: for this time, no batch waits behind those that run.
_SHARED_S = 1.0
#: Requests for this much time of execution may wait in the model's own queue, even if others share the model.
_AHEAD_NS = 1_000_000
#: The most requests that are let in because executions are short.
_MOST_AHEAD = 4096
#: Let in before an execution was measured.
_UNKNOWN = 64


class GateLimit:
    """The number of requests of one model that are let in. ``fixed`` is that number; 0 to find it.

    A second batch per instance, which is ready when the first is done, keeps the instances busy. It also doubles what
    a request waits for. So it is let in while one principal has the model, or if executions are short.
    """

    __slots__ = ("_alone", "_fixed", "_shared", "_shared_until_s", "_views", "clock", "now")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self._shared_until_s = clock, 0.0
        #: The versions that were asked since `settle`.
        self._views: dict[int, ModelView] = {}
        self.follow(maxsize)

    def follow(self, fixed: int) -> None:
        """Use another setting."""
        self._fixed = fixed
        self._alone = self._shared = self.now = fixed or _UNKNOWN

    def learn(self, view: ModelView) -> None:
        """Note a version that is being asked."""
        self._views[view.version] = view
        self._measure()

    def share(self, now_s: float) -> None:
        """Note that more than one principal uses the model."""
        self._shared_until_s, self.now = now_s + _SHARED_S, self._shared

    @property
    def is_shared(self) -> bool:
        return self._shared_until_s > self.clock()

    def settle(self) -> bool:
        """Choose the number again. Return False if that must be done soon: no execution was measured yet."""
        is_measured = not self._views or self._measure()
        if is_measured:
            self._views = {}
        self.now = self._shared if self.is_shared else self._alone
        return is_measured

    def _measure(self) -> bool:
        """Read what fills the instances. Return True if an execution was measured."""
        if self._fixed:
            return True
        capacities = [view.capacity() for view in self._views.values()]
        lasts_ns = max(view.occupancy.last_ns for view in self._views.values())
        if all(capacities):
            filled = sum(capacities)
            ahead = min(_AHEAD_NS // lasts_ns * filled, _MOST_AHEAD) if lasts_ns else _UNKNOWN
            self._shared, self._alone = filled + ahead, filled + max(ahead, filled)
        else:
            self._shared = self._alone = maxsize
        self.now = self._shared if self.is_shared else self._alone
        return lasts_ns > 0 or not all(capacities)
