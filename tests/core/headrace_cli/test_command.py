"""Commands: those of plugins run, help lists them, and a broken one is explained in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.plugins import Plugins
from headrace_cli import main

Start = Callable[..., Any]
Distribute = Callable[[str, str], None]

GREET = """
from headrace import Command, hookimpl

class Greet(Command):
    name = "greet"
    help = "say hello"
    synopsis = "[options] <who>"
    example = "headrace greet you"

    def add_arguments(self, parser):
        parser.add_argument("who")
        parser.add_argument("--loud", action="store_true", help="in capital letters")

    def run(self, arguments):
        text = f"hello {arguments.who}"
        print(text.upper() if arguments.loud else text)
        return 7

@hookimpl
def register_commands():
    return [Greet]
"""


def run(headrace: Start, *words: str) -> tuple[int, str, str]:
    """Return the exit code, stdout and stderr."""
    process = headrace(*words)
    code, stderr = process.finish()
    return code, process.popen.stdout.read(), stderr


def test_a_command_of_a_plugin_runs_and_is_listed(headrace: Start, distribute: Distribute) -> None:
    distribute("greet", GREET)
    assert run(headrace, "greet", "you", "--loud") == (7, "HELLO YOU\n", "")
    code, listed, _ = run(headrace, "--help")
    assert code == 0
    assert ["greet", "say hello"] in [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in listed.splitlines()
    ]
    plugins = json.loads(run(headrace, "plugins", "--json")[1])
    assert {one["name"]: one["parts"] for one in plugins}["greet"] == ["command greet"]


def test_its_arguments_are_checked_and_explained(headrace: Start, distribute: Distribute) -> None:
    distribute("greet", GREET)
    code, printed, complaint = run(headrace, "greet", "you", "--laud")
    assert (code, printed) == (1, "")
    assert complaint == (
        "Usage: headrace greet [options] <who>   (headrace greet --help lists them)\n\n"
        "unrecognized option '--laud'; did you mean '--loud'?\n"
    )
    code, printed, _ = run(headrace, "greet", "--help")
    assert code == 0
    for part in ("headrace greet [options] <who>", "say hello", "in capital letters", "Example: headrace greet you"):
        assert part in printed


def test_a_broken_plugin_is_the_reason_why_its_command_is_missing(headrace: Start, distribute: Distribute) -> None:
    distribute("greet", "import a_module_that_does_not_exist")
    code, _, complaint = run(headrace, "greet", "you")
    assert code == 1
    assert complaint.startswith("headrace: plugin 'greet' of headrace-greet 1.5 is broken: ModuleNotFoundError: ")
    assert complaint.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("serve", "command 'serve' is Headrace's own"),
        ("say hello", "command 'say hello': expected small letters, digits and '-', beginning with a letter"),
    ],
)
def test_a_command_with_an_invalid_name_breaks_its_plugin(
    name: str, reason: str, headrace: Start, distribute: Distribute
) -> None:
    distribute("greet", GREET.replace('"greet"', f'"{name}"'))
    plugins = json.loads(run(headrace, "plugins", "--json")[1])
    assert {one["name"]: one["error"] for one in plugins}["greet"] == f"TypeError: {reason}"
    shown = [line for line in run(headrace, "--help")[1].splitlines() if line.startswith(f"  {name} ")]
    assert [line for line in shown if "serve the models of a repository" not in line] == []


@pytest.mark.parametrize("name", ["check", "explain", "load", "unload", "index"])
def test_a_command_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_core = Plugins.discover(())
    monkeypatch.setattr(Plugins, "discover", lambda: only_core)
    assert main([name, "models"]) == 1
    assert capsys.readouterr().err == (
        f"headrace: The command '{name}' comes with the distribution headrace-inspect: pip install headrace-inspect; "
        f"no plugin provides command '{name}'; installed: plugins, serve\n"
    )
