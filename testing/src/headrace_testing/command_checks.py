"""Checks of a command: the command line finds it, shows its help, and refuses unknown arguments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import ClassVar

import pytest

from headrace import Command
from headrace_testing.driving import part_of

_LIMIT_S = 120


class CommandChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``command``, its name.

    ``good`` are arguments with which it succeeds; None skips the check. ``bad`` are arguments that fail, such as a
    missing file: it must say so in a few words, with exit code 1.
    """

    plugin: ClassVar[str]
    command: ClassVar[str]
    good: ClassVar[Sequence[str] | None] = None
    bad: ClassVar[Sequence[str] | None] = None

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run ``headrace COMMAND WORDS`` in a process of its own."""
        line = [sys.executable, "-m", "headrace_cli", self.command, *words]
        return subprocess.run(line, capture_output=True, text=True, timeout=_LIMIT_S, check=False)

    def test_help_shows_it_in_one_line(self) -> None:
        kind: type[Command] = part_of(self.plugin, "command", self.command)
        for text in (kind.help, kind.example):
            assert text == " ".join(text.split()), f"{text!r} is not one line"
        assert not kind.example or kind.example.startswith(f"headrace {self.command}"), kind.example

    def test_the_command_line_finds_it_and_explains_it(self) -> None:
        told = self.call("--help")
        assert (told.returncode, told.stderr) == (0, ""), (
            f"no installed distribution brings command '{self.command}'; add an entry point of the group headrace: "
            f'{self.command} = "{self.plugin}". {told.stderr}'
        )
        assert told.stdout.startswith(f"usage: headrace {self.command}"), told.stdout

    def test_an_unknown_option_is_refused(self) -> None:
        told = self.call("--no-such-option-of-any-command")
        assert told.returncode == 1, f"exit code {told.returncode} instead of 1"
        assert told.stderr, "it says nothing on stderr"
        assert not told.stdout, f"the complaint belongs on stderr: {told.stdout!r}"
        assert "Traceback" not in told.stderr, told.stderr

    def test_it_succeeds(self) -> None:
        if self.good is None:
            pytest.skip("it names no arguments with which it succeeds")
        told = self.call(*self.good)
        assert told.returncode == 0, f"exit code {told.returncode}: {told.stderr}"

    def test_what_it_cannot_do_is_said_without_a_traceback(self) -> None:
        if self.bad is None:
            pytest.skip("it names no arguments that it cannot do")
        told = self.call(*self.bad)
        assert told.returncode == 1, f"exit code {told.returncode} instead of 1"
        assert told.stdout + told.stderr, "it says nothing"
        assert "Traceback" not in told.stderr, told.stderr
