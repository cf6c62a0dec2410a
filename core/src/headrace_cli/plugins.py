"""``headrace plugins``: lists the installed plugins with their parts, and the reason if one is broken."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from textwrap import wrap

from headrace.command import Command
from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace.telemetry import logs
from headrace_cli.backend_table import backend_table

#: Characters in a line of the column of parts, unless one part is longer.
_PARTS_WIDTH = 80


class ListPlugins(Command):
    """Exit with 1 if a plugin is broken, has an unmarked hook, or has a part of another's name."""

    name = "plugins"
    help = "list the installed plugins"
    description = "List the installed plugins."
    example = "headrace plugins --json"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print a JSON array")
        parser.add_argument("--backends", action="store_true", help="print what each backend can do, as a table")

    def run(self, arguments: argparse.Namespace) -> int:
        plugins = Plugins.discover()
        if arguments.backends:
            print(backend_table(map(plugins.backends.get, plugins.backends.names())), end="")
        else:
            print(_json(plugins) if arguments.json else _picture(plugins))
        return 1 if plugins.complaints else 0


def _json(plugins: Plugins) -> str:
    return json.dumps([{**asdict(info), "conflicts": plugins.conflicts_of(info)} for info in plugins.plugins], indent=2)


def _picture(plugins: Plugins) -> str:
    rows = [row for info in plugins.plugins for row in _rows(info, plugins.conflicts_of(info))]
    hardware = [text for info in plugins.plugins for text in info.hardware]
    return logs.draw_table(("Plugin", "Distribution", "Version", "State", "Parts"), rows) + "\n".join(
        [*hardware, *plugins.complaints]
    )


def _rows(info: PluginInfo, conflicts: Sequence[str]) -> list[list[str]]:
    """Return the row of a plugin, and one more for each further line of its parts."""
    state = "broken" if info.error else "conflict" if conflicts else "unmarked hook" if info.unmarked else "ok"
    parts = ", ".join(part.replace(" ", "\xa0") for part in info.parts)  # wrapped between parts only
    lines = wrap(parts, _PARTS_WIDTH, break_long_words=False, break_on_hyphens=False) or ["-"]
    first, *others = [line.replace("\xa0", " ") for line in lines]
    return [[info.name, info.distribution, info.version, state, first], *(["", "", "", "", line] for line in others)]
