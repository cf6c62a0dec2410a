"""Headrace under systemd: notifies it that the server is ready, alive or stopping, and prints the units.

Flags: none. Without the variable ``NOTIFY_SOCKET``, which systemd sets, nothing is sent.
"""

from __future__ import annotations

from headrace import Command, Server, hookimpl
from headrace_service.notifications import Notifications
from headrace_service.service_command import ServiceCommand

__all__ = ["ServiceCommand", "register_commands", "server_started", "server_stopping"]

_notifications = Notifications()


@hookimpl
def register_commands() -> list[type[Command]]:
    return [ServiceCommand]


@hookimpl
def server_started(server: Server) -> None:
    _notifications.start(f"serving {len(server.served())} models")


@hookimpl
def server_stopping() -> None:
    _notifications.stop()
