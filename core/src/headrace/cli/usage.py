"""The help text of ``headrace serve``, and the argument parser of the other commands, with the same messages."""

from __future__ import annotations

import argparse
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import NoReturn

from headrace.cli.flags import GROUPS, Flag
from headrace.config.option_groups import OptionGroup, group_flags
from headrace.config.options import ServerOptions
from headrace.config.support import SUPPORT, FlagState

#: The exit code of every command for invalid arguments (docs/spec/behaviours.md section 8).
WRONG = 1


def complain(command: str, synopsis: str, text: str) -> int:
    """Print ``text``, an error in the arguments of ``command``, on stderr. Return the exit code."""
    print(f"Usage: {command} {synopsis}   ({command} --help lists them)\n\n{text}", file=sys.stderr)
    return WRONG


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


_HEAD = """\
Usage: headrace serve --model-repository=<path> [options]

Serve the models of a repository over HTTP (8000), gRPC (8001) and metrics (8002), until SIGTERM or SIGINT.

  headrace serve --model-repository=/srv/models
  headrace serve --model-repository=/srv/models --http-address=127.0.0.1 --log-verbose=1

Every flag of tritonserver is accepted. Write --flag=value or --flag value; an unambiguous prefix of a flag is enough.
<bool> is true, on, 1, false, off or 0.
"""
_MARKS = {
    FlagState.BUILT: "",
    FlagState.NO_EFFECT: "Accepted, without effect: ",
    FlagState.REFUSED: "Not built yet, refused when set: ",
}
_MARGIN = " " * 8


def render(plugins: Iterable[type[OptionGroup]] = ()) -> str:
    """Return the whole help, as wide as the terminal."""
    width = max(80, min(shutil.get_terminal_size((120, 0)).columns, 140))
    parts = [_HEAD, *(_group(name, flags, width) for name, flags in GROUPS.items())]
    return "\n".join([*parts, *(_plugin_group(kind, width) for kind in plugins)])


def default(flag: Flag) -> str:
    """Return the default of ``flag`` as it is written on a command line; empty if it has none."""
    field = next(field for field in fields(ServerOptions) if field.name == flag.option)
    value = field.default
    if flag.deprecated or value in (MISSING, None, "", ()):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def notes(flag: Flag) -> str:
    """Return the remarks on ``flag``: may be repeated, deprecated, without effect, refused."""
    support = SUPPORT[flag.option]
    told = [
        "May be repeated." if flag.gather else "",
        f"Deprecated: use --{flag.deprecated}." if flag.deprecated else "",
        f"{_MARKS[support.state]}{support.reason}." if support.reason else "",
    ]
    return " ".join(filter(None, told))


def _group(name: str, flags: Iterable[Flag], width: int) -> str:
    return f"{name}\n" + "".join(_flag(flag, width) for flag in flags)


def _flag(flag: Flag, width: int) -> str:
    head = f"  --{flag.name}" + (f"={flag.argument}" if flag.argument else "")
    known = default(flag)
    text = " ".join(filter(None, [flag.help, notes(flag), f"[{known}]" if known else "", _example(flag)]))
    return f"{head}\n{textwrap.fill(text, width, initial_indent=_MARGIN, subsequent_indent=_MARGIN)}\n"


def _example(flag: Flag) -> str:
    return f"Example: --{flag.name}" + (f"={flag.example}" if flag.example else "")


def _plugin_group(kind: type[OptionGroup], width: int) -> str:
    """Return the help on the options of one plugin, with the texts of its author."""
    title = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
    lines = [f"Plugin {kind.name}: {title}" if title else f"Plugin {kind.name}"]
    for flag in group_flags(kind):
        known = "Required." if flag.is_required else f"[{flag.default}]" if flag.default not in (None, "") else ""
        text = " ".join(filter(None, [flag.help, known]))
        lines.append(f"  {flag.text}=<{flag.argument}>")
        lines += textwrap.wrap(text, width, initial_indent=_MARGIN, subsequent_indent=_MARGIN)
    return "\n".join(lines) + "\n"
