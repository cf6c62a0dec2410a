"""One broken command per check. That check must fail. `Counts` is the sound one."""

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
    """Install ``kind`` for the kit, and run the command line in this process."""
    monkeypatch.setitem(sys.modules, "headrace_counts", SimpleNamespace(register_commands=hookimpl(lambda: [kind])))
    monkeypatch.setattr("headrace_cli._find", lambda name: kind)

    def call(checks: CommandConformance, *words: str) -> subprocess.CompletedProcess[str]:
        try:
            code = main([checks.command, *words])
        except SystemExit as error:
            code = int(str(error.code or 0))
        except ValueError as error:
            return subprocess.CompletedProcess(words, 1, "", f"Traceback: {error}")
        return subprocess.CompletedProcess(words, code, *capfd.readouterr())

    monkeypatch.setattr(CommandConformance, "call", call)


class HasTwoLines(Counts):
    help = "count\nthe files"


class Silent(Counts):
    """Accepts any argument."""

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
        (HasTwoLines, "its_help_is_one_line"),
        (Silent, "the_command_line_finds_it"),
        (Silent, "an_unknown_option_is_refused"),
        (Mute, "it_succeeds"),
        (Mute, "a_failure_is_reported_without_a_traceback"),
        (Raw, "a_failure_is_reported_without_a_traceback"),
    ],
)
def test_the_check_fails(
    kind: type[Command], check: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    install(kind, monkeypatch, capfd)
    with pytest.raises(AssertionError):
        getattr(TestCounts(), f"test_{check}")()


def test_a_command_without_an_entry_point_fails_with_the_entry_point() -> None:
    class Hidden(CommandConformance):
        plugin, command = "headrace_hidden", "hidden"

    with pytest.raises(AssertionError, match=r"brings command 'hidden'.*: hidden = \"headrace_hidden\""):
        Hidden().test_the_command_line_finds_it()
