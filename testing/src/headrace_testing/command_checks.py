"""Checks of a command: the command line finds it, shows its help, and refuses unknown arguments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import ClassVar

import pytest

from headrace import Command
from headrace_testing.driving import part_of
from headrace_testing.plugin import NOT_RUN

_LIMIT_S = 120


class CommandChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``command``, its name.

    ``good`` are arguments with which it succeeds; None skips the check. ``bad`` are arguments that fail, such as a
    missing file: the command prints the reason, and its exit code is 1.
    """

    plugin: ClassVar[str]
    command: ClassVar[str]
    good: ClassVar[Sequence[str] | None] = None
    bad: ClassVar[Sequence[str] | None] = None

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``headrace COMMAND WORDS`` in its own process."""
        line = [sys.executable, "-m", "headrace_cli", self.command, *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=_LIMIT_S, check=False)

    def test_its_help_is_one_line(self) -> None:
        kind: type[Command] = part_of(self.plugin, "command", self.command)
        for text in (kind.help, kind.example):
            assert text == " ".join(text.split()), f"{text!r} is not one line"
        assert not kind.example or kind.example.startswith(f"headrace {self.command}"), kind.example

    def test_the_command_line_finds_it(self) -> None:
        finished = self.call("--help")
        assert (finished.returncode, finished.stderr) == (0, ""), (
            f"no installed distribution brings command '{self.command}'; add an entry point of the group headrace: "
            f'{self.command} = "{self.plugin}". {finished.stderr}'
        )
        assert finished.stdout.startswith(f"usage: headrace {self.command}"), finished.stdout

    def test_an_unknown_option_is_refused(self) -> None:
        finished = self.call("--no-such-option-of-any-command")
        assert finished.returncode == 1, f"exit code {finished.returncode} instead of 1"
        assert finished.stderr, "stderr is empty"
        assert not finished.stdout, f"the error must be on stderr, not stdout: {finished.stdout!r}"
        assert "Traceback" not in finished.stderr, finished.stderr

    def test_it_succeeds(self) -> None:
        if self.good is None:
            pytest.skip(f"{NOT_RUN}{self.command}: it names no good arguments")
        finished = self.call(*self.good)
        assert finished.returncode == 0, f"exit code {finished.returncode}: {finished.stderr}"

    def test_a_failure_is_reported_without_a_traceback(self) -> None:
        if self.bad is None:
            pytest.skip(f"{NOT_RUN}{self.command}: it names no bad arguments")
        finished = self.call(*self.bad)
        assert finished.returncode == 1, f"exit code {finished.returncode} instead of 1"
        assert finished.stdout + finished.stderr, "it prints nothing"
        assert "Traceback" not in finished.stderr, finished.stderr
