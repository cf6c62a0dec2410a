"""A command of the command line, ``headrace NAME``, and the parser of its arguments."""

from __future__ import annotations

import argparse
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from difflib import get_close_matches
from typing import ClassVar, NoReturn

#: The exit code of every command for invalid arguments (docs/spec/behaviours.md section 8).
WRONG = 1


def complain(command: str, synopsis: str, text: str) -> int:
    """Print ``text``, an error in the arguments of ``command``, on stderr. Return the exit code."""
    print(f"Usage: {command} {synopsis}   ({command} --help lists them)\n\n{text}", file=sys.stderr)
    return WRONG


class Command(ABC):
    """A command: ``headrace NAME``. The command line makes one object, parses the arguments, and runs it."""

    name: ClassVar[str]
    #: Its purpose in a few words: its line in ``headrace --help``.
    help: ClassVar[str]
    #: The words after its name in the usage line.
    synopsis: ClassVar[str] = "[options]"
    #: The first lines of ``headrace NAME --help``; `help` if it is empty.
    description: ClassVar[str] = ""
    #: A whole command line, for ``headrace NAME --help``.
    example: ClassVar[str] = ""

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments in ``words``. Raises SystemExit: with 0 for ``--help``, with 1 if they are invalid."""
        parser = Parser(
            f"headrace {self.name}",
            self.synopsis,
            self.description or self.help,
            f"Example: {self.example}" if self.example else "",
        )
        self.add_arguments(parser)
        return parser.parse(words)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the arguments of this command to ``parser``; ``--help`` is there already."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Run the command and return the exit code: 0 for success. Results are printed to stdout, errors to stderr."""


class Parser(argparse.ArgumentParser):
    """A parser with the error messages of ``headrace serve``. ``synopsis`` is the usage line after the command."""

    def __init__(self, prog: str, synopsis: str, description: str, epilog: str = "") -> None:
        super().__init__(prog=prog, usage=f"{prog} {synopsis}", description=description, epilog=epilog)
        self._synopsis = synopsis

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Return the arguments in ``words``. Raises SystemExit with the code `WRONG` if they are invalid."""
        arguments, rest = self.parse_known_args(words)
        if rest:
            self.error(self._explain(rest[0]))
        return arguments

    def error(self, message: str) -> NoReturn:
        raise SystemExit(complain(self.prog, self._synopsis, message))

    def _explain(self, word: str) -> str:
        if not word.startswith("-"):
            return f"Unexpected argument: {word}"
        name = word.partition("=")[0]
        nearest = get_close_matches(name, self._option_string_actions, 1)
        return f"unrecognized option '{name}'" + (f"; did you mean '{nearest[0]}'?" if nearest else "")
