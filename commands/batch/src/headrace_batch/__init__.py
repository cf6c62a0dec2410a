"""The command ``headrace batch``: infers every row of a file with a model, in this process, and writes a file."""

from __future__ import annotations

from headrace import Command, hookimpl
from headrace_batch.batch_command import BatchCommand

__all__ = ["BatchCommand", "register_commands"]


@hookimpl
def register_commands() -> list[type[Command]]:
    return [BatchCommand]
