"""The command ``headrace compare``: the same requests to two servers, and every difference between their answers."""

from __future__ import annotations

from headrace import Command, hookimpl


@hookimpl
def register_commands() -> list[type[Command]]:
    from headrace_compare.compare_command import Compare

    return [Compare]
