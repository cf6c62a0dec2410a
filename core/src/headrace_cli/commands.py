"""The plugin ``commands``: the commands of core and the flags ``--security-...``, registered through the same hooks as
parts of plugins.
"""

from __future__ import annotations

from headrace.command import Command
from headrace.config.option_groups import OptionGroup
from headrace.hookspecs import hookimpl
from headrace.models.interceptors import Interceptor


@hookimpl
def register_commands() -> list[type[Command]]:
    from headrace_cli.plugins import ListPlugins
    from headrace_cli.serve import Serve

    return [Serve, ListPlugins]


@hookimpl
def add_options() -> list[type[OptionGroup]]:
    from headrace_cli.security.security_options import SecurityOptions

    return [SecurityOptions]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    from headrace_cli.security.closed_operations import ClosedOperations

    return [ClosedOperations]
