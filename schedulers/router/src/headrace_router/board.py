"""The changes of traffic that were made while the server runs. They hold when a router is loaded again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from headrace_router.router_scheduler import RouterScheduler

#: A change as JSON: ``model``, ``version``, the ``table`` that it was made for, and what changes.
Change: TypeAlias = "Mapping[str, Any]"


@dataclass(slots=True)
class TrafficBoard:
    """What the routers of one server share."""

    #: The last change of each router, by model and version.
    changes: dict[tuple[str, str], Change] = field(default_factory=dict)
    #: The names of the routers that read headers.
    header_readers: set[str] = field(default_factory=set)

    def note(self, change: Change) -> None:
        """Keep ``change`` for the router when it is loaded again."""
        self.changes[change["model"], change["version"]] = change

    def join(self, router: RouterScheduler, model: str, version: int) -> None:
        """Apply the last change to ``router``, which is being loaded, unless its config has other targets by now."""
        if router.table.reads_headers:
            self.header_readers.add(model)
        change = self.changes.get((model, str(version)))
        if change is not None and change["table"] == router.written:
            router.apply(change)
