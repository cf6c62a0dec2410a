"""The plugin ``commands``: the commands that come with core, registered through the same hook as everybody else's."""

from __future__ import annotations

from headrace.command import Command
from headrace.hookspecs import hookimpl


@hookimpl
def register_commands() -> list[type[Command]]:
    from headrace_cli.plugins import ListPlugins
    from headrace_cli.serve import Serve

    return [Serve, ListPlugins]
