"""The help of ``headrace serve``: every flag, by group, with its default, an example and its state."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, fields

from headrace.cli.flags import GROUPS, Flag
from headrace.config.options import ServerOptions
from headrace.config.support import SUPPORT, FlagState

_HEAD = """\
Usage: headrace serve --model-repository=<path> [options]

Serve the models of a repository over HTTP (8000), gRPC (8001) and metrics (8002), until SIGTERM or SIGINT.

  headrace serve --model-repository=/srv/models
  headrace serve --model-repository=/srv/models --http-address=127.0.0.1 --log-verbose=1

Every flag of tritonserver is taken. Write --flag=value or --flag value; a prefix that only one flag has is enough.
<bool> is true, on, 1, false, off or 0. Flags that may be given more than once say so.
"""
_MARKS = {
    FlagState.BUILT: "",
    FlagState.NO_EFFECT: "Accepted, without effect: ",
    FlagState.REFUSED: "Not built yet, refused when set: ",
}
_MARGIN = " " * 8


def render(plugins: argparse.ArgumentParser | None = None) -> str:
    """The whole help, as wide as the terminal allows."""
    width = max(80, min(shutil.get_terminal_size((120, 0)).columns, 140))
    parts = [_HEAD, *(_group(name, flags, width) for name, flags in GROUPS.items())]
    return "\n".join([*parts, *_plugin_part(plugins)])


def default(flag: Flag) -> str:
    """The default of ``flag`` as one would write it; empty where there is none."""
    field = next(field for field in fields(ServerOptions) if field.name == flag.option)
    value = field.default
    if flag.deprecated or value in (MISSING, None, "", ()):
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def notes(flag: Flag) -> str:
    """What else there is to know: repeated, deprecated, without effect, refused."""
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


def _plugin_part(parser: argparse.ArgumentParser | None) -> list[str]:
    """The options that plugins added, in the words of their authors."""
    if parser is None:
        return []
    _, _, listing = parser.format_help().partition("options:\n")
    return [f"Plugins\n{listing}"] if listing else []
