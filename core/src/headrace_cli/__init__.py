"""The command line: ``headrace serve``, ``headrace plugins`` and the commands of plugins.

Exit codes: 0 for success, and 1 for failure or invalid arguments (docs/spec/behaviours.md section 8).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import TYPE_CHECKING

from headrace_cli.import_time import without_collections

if TYPE_CHECKING:
    from headrace.command import Command

_HEAD = """\
Usage: headrace <command> [options]
"""
_TAIL = """\
  headrace <command> --help    show the options of one command, and an example
  headrace --version           print the version
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. ``arguments`` default to the command line of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(_help(), file=sys.stderr, end="")
        return 1
    name, *rest = words
    if name == "--version":
        print(f"headrace {metadata.version('headrace')}")
        return 0
    if name in ("-h", "--help"):
        print(_help(), end="")
        return 0
    return _run(name, rest)


def _run(name: str, words: Sequence[str]) -> int:
    from headrace.errors import LoadError

    try:
        with without_collections():
            command = _find(name)()
    except LoadError as error:
        print(f"headrace: {error.message}", file=sys.stderr)
        return 1
    try:
        code = command.run(command.parse(words))
        if not isinstance(code, int):
            raise TypeError(f"run() of command '{name}' returned {code!r}, expected an exit code")
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _find(name: str) -> type[Command]:
    """Return the command ``name``. Raises `LoadError`. Commands of core are found without importing any plugin."""
    from headrace_cli import commands

    for command in commands.register_commands():
        if command.name == name:
            return command
    from headrace.plugins import Plugins

    return Plugins.discover().commands.get(name)


def _help() -> str:
    from headrace.errors import LoadError
    from headrace.plugins import Plugins

    commands, known = Plugins.discover().commands, []
    for name in commands.names():
        with contextlib.suppress(LoadError):  # two plugins have it: `headrace plugins` lists the conflict
            known.append(commands.get(name))
    width = max(len(command.name) for command in known)
    lines = [f"  {command.name:<{width}}  {command.help}" for command in known]
    return "\n".join([_HEAD, *lines, "", _TAIL])
