"""The traffic settings that were changed at run time. They apply again after a reload of the router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from headrace_router.router_scheduler import RouterScheduler, RouterState


class Change(TypedDict):
    """A change as JSON. ``table`` has the targets of its config."""

    model: str
    version: str
    table: str
    state: RouterState


@dataclass(slots=True)
class TrafficBoard:
    """The common state of the routers of one server."""

    #: The last change of each router, by model and version.
    changes: dict[tuple[str, str], Change] = field(default_factory=dict)
    #: The names of the routers that read headers.
    header_readers: set[str] = field(default_factory=set)
    #: Tells a change to all workers. None in a server without frontends, which has none.
    publish: Callable[[Change], None] | None = None

    def store(self, change: Change) -> None:
        """Store ``change`` for the next load of the router."""
        self.changes[change["model"], change["version"]] = change

    def join(self, router: RouterScheduler, model: str, version: int) -> None:
        """Apply the last change to ``router``, which is being loaded, unless its config has other targets by now."""
        if router.table.reads_headers:
            self.header_readers.add(model)
        change = self.changes.get((model, str(version)))
        if change is not None and change["table"] == router.written:
            router.apply(change["state"])

        def rolled_back(of: RouterScheduler) -> None:
            change: Change = {"model": model, "version": str(version), "table": of.written, "state": of.state()}
            self.store(change)
            if self.publish is not None:
                self.publish(change)

        router.on_rollback = rolled_back
