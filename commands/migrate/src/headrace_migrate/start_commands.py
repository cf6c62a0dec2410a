"""The start command of an image: the last ENTRYPOINT and the last CMD of its stage, or those of the stage below.

Source: Docker's Dockerfile reference, "Understand how CMD and ENTRYPOINT interact".

| | CMD in JSON | CMD in shell form |
|---|---|---|
| no ENTRYPOINT | the words of CMD | ``/bin/sh -c CMD`` |
| ENTRYPOINT in JSON | both, one after the other | the words of ENTRYPOINT, then ``/bin/sh -c CMD`` |
| ENTRYPOINT in shell form | ``/bin/sh -c ENTRYPOINT`` | the same |
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from headrace_migrate.container_parts import ContainerParts
from headrace_migrate.dockerfile_syntax import Instruction
from headrace_migrate.report import Report, Verdict
from headrace_migrate.server_commands import PlacedWord, ServerCommands
from headrace_migrate.shell_commands import program_at
from headrace_migrate.shell_scripts import ShellScripts, drop_word, script_of
from headrace_migrate.shell_words import Word

_PAGE = "docs/migrating.md#dockerfiles"
_JSON_WORD = re.compile(r'"(?:[^"\\]|\\.)*"')


@dataclass(slots=True)
class ImageStart:
    """The start command of a stage. ``owns_command`` is False for a CMD of the stage below."""

    entry: Instruction | None = None
    command: Instruction | None = None
    owns_command: bool = False

    def set(self, each: Instruction) -> None:
        """Take an ENTRYPOINT or a CMD. An ENTRYPOINT removes the CMD of the stage below."""
        if each.name == "CMD":
            self.command, self.owns_command = each, True
            return
        self.entry = each
        if not self.owns_command:
            self.command = None

    def above(self) -> ImageStart:
        """Return what a stage on top of this one starts."""
        return ImageStart(self.entry, self.command)


class StartCommands:
    """Reads what the last stage starts into ``report``."""

    def __init__(self, report: Report, commands: ServerCommands, parts: ContainerParts) -> None:
        self._report, self._commands, self._parts = report, commands, parts
        self._scripts = ShellScripts(commands, parts)

    def read(self, start: ImageStart) -> None:
        """Report on ``start``. Raises `BadInput`."""
        entry = self._read_json(start.entry) if start.entry else []
        command = self._read_json(start.command) if start.command else []
        if entry is None:
            assert start.entry is not None
            self._read_shell(start.entry)
            if start.command is not None and command != []:
                self._add(start.command, Verdict.AS_IT_IS, "no effect: ENTRYPOINT is in shell form")
        elif command is not None:
            self._read_words(entry, command)
        else:
            assert start.command is not None
            self._read_shell_behind(entry, start.command)

    def _read_shell_behind(self, entry: Sequence[PlacedWord], command: Instruction) -> None:
        """Report on a CMD in shell form: ``entry`` gets ``/bin/sh -c CMD`` as arguments."""
        texts = [word.text for word in entry]
        lacks_script = script_of(texts) is None and script_of([*texts, ""]) is not None
        if program_at(texts) is not None or lacks_script:
            detail = f"{texts[0]} gets the arguments /bin/sh -c: write CMD as JSON"
            self._add(command, Verdict.DIFFERS, detail)
            self._read_words(entry, ())
            return
        for index in self._commands.read_entry_points(entry):
            drop_word(entry, index, self._parts)
        self._read_script_name(entry)
        self._read_shell(command)

    def _read_words(self, entry: Sequence[PlacedWord], command: Sequence[PlacedWord]) -> None:
        words = [*entry, *command]
        texts = [word.text for word in words]
        if program_at(texts) is None and self._read_script_name(words):
            return
        if script_of(texts) is not None:
            self._scripts.read_words(words)
            return
        for index in self._commands.read(words):
            if index < len(entry):
                drop_word(entry, index, self._parts)
            else:
                drop_word(command, index - len(entry), self._parts)

    def _read_script_name(self, words: Sequence[PlacedWord]) -> bool:
        """Report on a script that the image starts. Return False if it starts none."""
        if not words or PurePosixPath(words[0].text).suffix != ".sh" or self._commands.is_entry_point(words[0]):
            return False
        detail = "a script: migrate it, too, if it calls the program"
        self._report.add(words[0].line, "program", words[0].text, Verdict.DIFFERS, detail, "docs/migrating.md#limits")
        return True

    def _read_shell(self, each: Instruction) -> None:
        if each.body.lstrip().startswith("["):
            self._add(each, Verdict.DIFFERS, "no JSON: it runs in a shell, with the brackets")

        def locate(word: Word) -> PlacedWord:
            start, end = each.start + word.start, each.start + word.end
            return PlacedWord(word.text, self._parts.edits.line_of(start), (start, end))

        self._scripts.read(each.body, locate)

    def _read_json(self, each: Instruction) -> list[PlacedWord] | None:
        """Return the words of the JSON form; None if ``each`` is in shell form."""
        try:
            value = json.loads(each.body.replace("\\\n", "  "))
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            return None
        spans = [found.span() for found in _JSON_WORD.finditer(each.body)]
        return [
            PlacedWord(word, self._parts.edits.line_of(each.start + start), (each.start + start, each.start + end))
            for word, (start, end) in zip(value, spans, strict=False)
        ]

    def _add(self, each: Instruction, verdict: Verdict, detail: str) -> None:
        name = f"{each.name} {' '.join(each.body.split())}"
        self._report.add(each.line, "command", name, verdict, detail, _PAGE)
