"""The plugin ``processes``. It is a module of its own, because a child imports this package and has no pluggy."""

from __future__ import annotations

from headrace import ExecutorKind, hookimpl


@hookimpl
def register_executors() -> list[type[ExecutorKind]]:
    from headrace_processes.process_kind import ProcessExecutors

    return [ProcessExecutors]
