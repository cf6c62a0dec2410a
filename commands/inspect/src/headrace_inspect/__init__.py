"""The commands ``headrace check``, ``explain``, ``load``, ``unload`` and ``index``."""

from __future__ import annotations

from headrace import Command, hookimpl


@hookimpl
def register_commands() -> list[type[Command]]:
    from headrace_inspect.check import Check
    from headrace_inspect.explain import Explain
    from headrace_inspect.repository import Index, Load, Unload

    return [Check, Explain, Load, Unload, Index]
