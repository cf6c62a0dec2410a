"""One broken command per check, each to be caught by the check that is meant for it; `Counts` is sound."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from headrace import Command, hookimpl
from headrace_cli import main
from headrace_testing import CommandConformance


class Counts(Command):
    """Counts the files of a directory."""

    name = "counts"
    help = "count the files of a directory"
    example = "headrace counts models"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("path", type=Path)

    def run(self, arguments: argparse.Namespace) -> int:
        if not arguments.path.is_dir():
            print(f"'{arguments.path}' is no directory", file=sys.stderr)
            return 1
        print(len(list(arguments.path.iterdir())))
        return 0


class TestCounts(CommandConformance):
    plugin, command = "headrace_counts", "counts"
    good, bad = (str(Path(__file__).parent),), ("nowhere",)
    kind: ClassVar[type[Command]] = Counts

    @pytest.fixture(autouse=True)
    def module(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        install(self.kind, monkeypatch, capfd)


def install(kind: type[Command], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Install ``kind`` for the kit and for the command line, which runs in this process."""
    monkeypatch.setitem(sys.modules, "headrace_counts", SimpleNamespace(register_commands=hookimpl(lambda: [kind])))
    monkeypatch.setattr("headrace_cli._find", lambda name: kind)

    def call(checks: CommandConformance, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            code = main([checks.command, *words])
        except SystemExit as leaving:
            code = int(str(leaving.code or 0))
        except ValueError as error:
            return subprocess.CompletedProcess(words, 1, "", f"Traceback: {error}")
        told = capfd.readouterr()
        return subprocess.CompletedProcess(words, code, told.out, told.err)

    monkeypatch.setattr(CommandConformance, "call", call)


class Rambles(Counts):
    help = "count\nthe files"


class Silent(Counts):
    """Takes any argument, and finds nothing wrong."""

    def parse(self, words: object) -> argparse.Namespace:
        return argparse.Namespace(path=Path())


class Mute(Counts):
    def run(self, arguments: argparse.Namespace) -> int:
        return 1


class Raw(Counts):
    def run(self, arguments: argparse.Namespace) -> int:
        raise ValueError("nowhere")


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        (Rambles, "help_shows_it_in_one_line"),
        (Silent, "the_command_line_finds_it_and_explains_it"),
        (Silent, "an_unknown_option_is_refused"),
        (Mute, "it_succeeds"),
        (Mute, "what_it_cannot_do_is_said_without_a_traceback"),
        (Raw, "what_it_cannot_do_is_said_without_a_traceback"),
    ],
)
def test_the_check_catches_it(
    kind: type[Command], check: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(kind, monkeypatch, capfd)
    with pytest.raises(AssertionError):
        getattr(TestCounts(), f"test_{check}")()


def test_a_command_that_is_not_installed_is_told_of_its_entry_point() -> None:
    class Hidden(CommandConformance):
        plugin, command = "headrace_hidden", "hidden"

    with pytest.raises(AssertionError, match=r"brings command 'hidden'.*: hidden = \"headrace_hidden\""):
        Hidden().test_the_command_line_finds_it_and_explains_it()
