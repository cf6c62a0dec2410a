"""The commands ``headrace check`` and ``headrace explain``."""

from __future__ import annotations

from headrace import Command, hookimpl


@hookimpl
def register_commands() -> list[type[Command]]:
    from headrace_inspect.check import Check
    from headrace_inspect.explain import Explain

    return [Check, Explain]
