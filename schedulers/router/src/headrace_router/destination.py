"""A served target: its calls and the outcomes of its requests."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from headrace import OtherModel
from headrace_router.routing_table import RouteTarget
from headrace_router.windows import SlidingWindow


class Destination:
    """A target of a router. ``window`` has its last requests, of ``window_ns``."""

    __slots__ = ("alike", "ask", "errors", "label", "name", "outputs", "requests", "rollbacks", "version", "window")

    def __init__(self, target: RouteTarget, other: OtherModel, outputs: Collection[str], window_ns: int) -> None:
        self.label, self.name, self.version = target.label, target.dependency.model, target.version
        self.ask = other.ask
        #: The outputs that the router has, if the target has more.
        self.outputs = () if set(other.outputs) == set(outputs) else tuple(outputs)
        #: See `headrace.InferRequest.alike`: requests to different targets are not alike.
        self.alike = object()
        self.requests = self.errors = self.rollbacks = 0
        self.window = SlidingWindow(window_ns)

    def status(self, now_ns: int) -> dict[str, Any]:
        """Return the counts as JSON."""
        total = self.window.total(now_ns)
        return {
            "requests": self.requests,
            "errors": self.errors,
            "window": {
                "requests": total.requests,
                "error_rate": round(total.error_rate, 6),
                "p99_us": total.percentile_ns(0.99) // 1000,
            },
        }
