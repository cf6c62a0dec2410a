"""The command ``headrace migrate``: what of a deployment of Triton, TorchServe or MLServer runs as it is.

Flags: none. It reads files and starts nothing.
"""

from __future__ import annotations

from headrace import Command, hookimpl


@hookimpl
def register_commands() -> list[type[Command]]:
    from headrace_migrate.migrate_command import Migrate

    return [Migrate]
