"""The help text of ``headrace serve``."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields

from headrace.config.option_groups import GroupFlag, OptionGroup, group_flags
from headrace.config.options import ServerOptions
from headrace.config.support import NEEDS, SUPPORT, FlagState
from headrace_cli.flags import FLAGS, GROUPS, Flag

_BOOL = "<bool> is true, on, 1, false, off or 0."
_HEAD = f"""\
Usage: headrace serve --model-repository=<path> [options]

Serve the models of a repository over HTTP (8000), gRPC (8001) and metrics (8002), until SIGTERM or SIGINT.

  headrace serve --model-repository=/srv/models
  headrace serve --model-repository=/srv/models --http-address=127.0.0.1 --log-verbose=1

Every flag of tritonserver is accepted. Write --flag=value or --flag value; an unambiguous prefix of a flag is enough.
@<path> is a file with a flag in each line, for secrets that the list of processes should not show.
{_BOOL}
"""
_MARKS = {
    FlagState.BUILT: "",
    FlagState.NO_EFFECT: "Accepted, without effect: ",
    FlagState.REFUSED: "Not built yet, refused when set: ",
}
_MARGIN = " " * 8


@dataclass(frozen=True, slots=True)
class FlagHelp:
    """One flag for a help text: ``name`` without its dashes, ``argument`` as ``<bool>``, or empty without one.

    ``text`` is what the flag does, with its default. ``group`` is the heading above it, empty for a flag of a plugin.
    ``state`` is "built", "no effect" or "refused", and ``reason`` is the reason. ``needs`` is the extension without
    which the flag is refused.
    """

    name: str
    argument: str
    text: str
    group: str = ""
    state: str = FlagState.BUILT.value
    reason: str = ""
    needs: str = ""


def flag_helps(plugins: Iterable[type[OptionGroup]] = ()) -> list[FlagHelp]:
    """Return the flags of ``headrace serve``, then the flags of plugins."""
    own = [_help(flag, title) for title, group in GROUPS.items() for flag in group]
    return own + [
        FlagHelp(flag.text.removeprefix("--"), f"<{flag.argument}>", _plugin_text(flag))
        for kind in plugins
        for flag in group_flags(kind)
    ]


def _help(flag: Flag, group: str) -> FlagHelp:
    support = SUPPORT[flag.option]
    needs = NEEDS.get(flag.option, "")
    return FlagHelp(flag.name, flag.argument, _text(flag), group, support.state.value, support.reason, needs)


def render(plugins: Iterable[type[OptionGroup]] = ()) -> str:
    """Return the whole help, as wide as the terminal."""
    width = _width()
    parts = [_HEAD, *(_group(name, flags, width) for name, flags in GROUPS.items())]
    return "\n".join([*parts, *(_plugin_group(kind, width) for kind in plugins)])


def of_bad_flag(message: str) -> str:
    """Return the help of the flag that ``message``, about a bad option, names; empty if it names none."""
    found = re.match('Bad option: "--([a-z0-9-]+)"', message)
    flag = FLAGS.get(found[1]) if found else None
    if flag is None:
        return ""
    return f"\n\n{_flag(flag, _width())}" + (f"{_MARGIN}{_BOOL}\n" if flag.argument == "<bool>" else "")


def _width() -> int:
    return max(80, min(shutil.get_terminal_size((120, 0)).columns, 140))


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
    sentences = [
        "May be repeated." if flag.gather else "",
        f"Deprecated: use --{flag.deprecated}." if flag.deprecated else "",
        f"{_MARKS[support.state]}{support.reason}." if support.reason else "",
    ]
    return " ".join(filter(None, sentences))


def _group(name: str, flags: Iterable[Flag], width: int) -> str:
    return f"{name}\n" + "".join(_flag(flag, width) for flag in flags)


def _flag(flag: Flag, width: int) -> str:
    head = f"  --{flag.name}" + (f"={flag.argument}" if flag.argument else "")
    text = f"{_text(flag)} {_example(flag)}"
    return f"{head}\n{textwrap.fill(text, width, initial_indent=_MARGIN, subsequent_indent=_MARGIN)}\n"


def _text(flag: Flag) -> str:
    known = default(flag)
    return " ".join(filter(None, [flag.help, notes(flag), f"[{known}]" if known else ""]))


def _example(flag: Flag) -> str:
    return f"Example: --{flag.name}" + (f"={flag.example}" if flag.example else "")


def _plugin_group(kind: type[OptionGroup], width: int) -> str:
    """Return the help on the options of one plugin, with the texts of its author."""
    title = inspect.cleandoc(kind.__doc__ or "").partition("\n")[0]
    lines = [f"Plugin {kind.name}: {title}" if title else f"Plugin {kind.name}"]
    for flag in group_flags(kind):
        lines.append(f"  {flag.text}=<{flag.argument}>")
        lines += textwrap.wrap(_plugin_text(flag), width, initial_indent=_MARGIN, subsequent_indent=_MARGIN)
    return "\n".join(lines) + "\n"


def _plugin_text(flag: GroupFlag) -> str:
    known = "Required." if flag.is_required else f"[{flag.default}]" if flag.default not in (None, "") else ""
    return " ".join(filter(None, [flag.help, known]))
