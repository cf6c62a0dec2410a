"""The dashboard of a server: a page that shows what its HTTP routes say, at ``/dashboard``.

The page asks the routes that all clients ask, so what protects them protects it. It is a plugin of static files and
two routes that no client has: counts and memory of all models, and the last log records. A server that nobody looks at
pays nothing.
"""

from __future__ import annotations

from headrace import Extension, OptionGroup, Server, hookimpl
from headrace_dashboard.dashboard_routes import Dashboard, DashboardOptions, note_server

__all__ = ["Dashboard", "DashboardOptions", "add_options", "register_extensions", "server_started"]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Dashboard]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    return [DashboardOptions]


@hookimpl
def server_started(server: Server) -> None:
    note_server(server)
