"""``penstock plugins``: what is installed, what it brings, and why something is broken."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from penstock.plugins import PluginInfo, Plugins
from penstock.telemetry import tables


def run(words: Sequence[str]) -> int:
    """Print every plugin; 1 if one of them is broken."""
    parser = argparse.ArgumentParser(
        prog="penstock plugins", description="List the plugins that are installed. Example: penstock plugins --json"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON array")
    arguments = parser.parse_args(words)
    found = Plugins.discover().plugins
    print(json.dumps([asdict(plugin) for plugin in found], indent=2) if arguments.json else _picture(found))
    return 1 if any(plugin.error for plugin in found) else 0


def _picture(found: Sequence[PluginInfo]) -> str:
    table = tables.draw(("Plugin", "Distribution", "Version", "Parts", "State"), [_row(plugin) for plugin in found])
    return table + "\n".join(f"{plugin.name} is broken: {plugin.error}" for plugin in found if plugin.error)


def _row(plugin: PluginInfo) -> list[str]:
    parts = ", ".join(plugin.parts) or "-"
    return [plugin.name, plugin.distribution, plugin.version, parts, "broken" if plugin.error else "ok"]
