"""The command line: ``headrace serve | check | explain | plugins``.

Exit codes: 0 for success, and 1 for failure or invalid arguments (docs/spec/behaviours.md section 8).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module, metadata

_HELP = """\
Usage: headrace <command> [options]

  serve      serve the models of a repository           headrace serve --model-repository=/srv/models
  check      list the problems of a repository          headrace check /srv/models
  explain    show why the batches of a model ran        headrace explain mlp
  plugins    list the installed plugins                 headrace plugins

  headrace <command> --help    show the options of one command
  headrace --version           print the version
"""
_COMMANDS = ("serve", "check", "explain", "plugins")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. ``arguments`` default to those of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words:
        print(_HELP, file=sys.stderr, end="")
        return 1
    command, *rest = words
    if command in _COMMANDS:
        return _run(command, rest)
    if command in ("-h", "--help", "--version"):
        print(f"headrace {metadata.version('headrace')}" if command == "--version" else _HELP.rstrip())
        return 0
    nearest = get_close_matches(command, _COMMANDS, 1)
    hint = f"; did you mean '{nearest[0]}'?" if nearest else ""
    print(f"headrace: no command '{command}'{hint}\n\n{_HELP}", file=sys.stderr, end="")
    return 1


def _run(command: str, words: Sequence[str]) -> int:
    try:
        code = int(import_module(f"headrace.cli.{command}").run(words))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
