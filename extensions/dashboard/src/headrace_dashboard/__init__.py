"""The dashboard of a server: a page at ``/dashboard`` that shows data of its HTTP routes.

The page uses the routes of all clients, so the same access rules apply. The plugin has static files and two routes of
its own: counts and memory of all models, and the last log records. Without a reader, it costs nothing.
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
