"""How the commands beside ``serve`` read their arguments: as it does, with the same words for what is wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

#: The exit code for arguments that cannot be read, of every command (docs/spec/behaviours.md section 8).
WRONG = 1


def complain(command: str, form: str, text: str) -> int:
    """Say on stderr what is wrong with the arguments of ``command``; returns the exit code."""
    print(f"Usage: {command} {form}   ({command} --help lists them)\n\n{text}", file=sys.stderr)
    return WRONG


class Parser(argparse.ArgumentParser):
    """A parser that complains as ``headrace serve`` does. ``form`` is what follows the command."""

    def __init__(self, prog: str, form: str, description: str, epilog: str = "") -> None:
        super().__init__(prog=prog, usage=f"{prog} {form}", description=description, epilog=epilog)
        self._form = form

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """What ``words`` say. Ends the process, with `WRONG`, if they cannot be read."""
        arguments, rest = self.parse_known_args(words)
        if rest:
            self.error(self._explain(rest[0]))
        return arguments

    def error(self, message: str) -> NoReturn:
        raise SystemExit(complain(self.prog, self._form, message))

    def _explain(self, word: str) -> str:
        if not word.startswith("-"):
            return f"Unexpected argument: {word}"
        name = word.partition("=")[0]
        nearest = get_close_matches(name, self._option_string_actions, 1)
        return f"unrecognized option '{name}'" + (f"; did you mean '{nearest[0]}'?" if nearest else "")
