"""A text for a shell: a command line, or a script with one in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace_migrate.container_parts import ContainerParts
from headrace_migrate.images import triton_image
from headrace_migrate.openai_frontend import frontend_at
from headrace_migrate.report import BadInput
from headrace_migrate.server_commands import PlacedWord, ServerCommands
from headrace_migrate.shell_commands import container_call, program_at
from headrace_migrate.shell_words import NotClosed, Word, simple_commands

#: Returns the place of a word of the shell in the whole text, and its line.
Locate = Callable[[Word], PlacedWord]


def in_place(word: Word) -> PlacedWord:
    """Return ``word`` of a text that is the whole text."""
    return PlacedWord(word.text, word.line, (word.start, word.end))


class ShellScripts:
    """Reads shell texts: each command of Triton's program, and what ``docker run`` starts."""

    def __init__(self, commands: ServerCommands, parts: ContainerParts) -> None:
        self._commands, self._parts = commands, parts

    def read(self, source: str, locate: Locate = in_place) -> None:
        """Report on ``source``. Raises `BadInput` for quotation marks that are not closed."""
        for words in self._commands_of(source, locate):
            call = container_call(words)
            if call is None:
                self.read_words([locate(word) for word in words])
                continue
            image = triton_image(call.image.text) if call.image is not None else None
            texts = [word.text for word in call.command]
            runs_program = program_at(texts) is not None or frontend_at(texts) is not None
            if image is None and not runs_program:
                continue
            for name, value, line in call.options:
                self._read_option(name, value, line)
            if call.image is not None:
                place = locate(call.image)
                if image is not None:
                    self._parts.read_image(image, place.line, place.span)
                else:
                    self._parts.read_own_image(place.text, place.line)
            self._commands.found += 1
            self.read_words([locate(word) for word in call.command])

    @staticmethod
    def _commands_of(source: str, locate: Locate) -> list[list[Word]]:
        try:
            return list(simple_commands(source))
        except NotClosed as error:
            raise BadInput(str(error), locate(error.word).line) from None

    def _read_option(self, name: str, value: str, line: int) -> None:
        if name in ("-e", "--env"):
            self._commands.read_variable(*value.partition("=")[::2], line)
        else:
            self._parts.read_option(name, value, line)

    def read_words(self, words: Sequence[PlacedWord]) -> None:
        """Report on one command. Raises `BadInput`."""
        script = script_of([word.text for word in words])
        if script is not None:  # sh -c "..."
            outer = words[script]
            self.read(outer.text, lambda word: PlacedWord(word.text, outer.line, None))
            return
        for index in self._commands.read(words):
            drop_word(words, index, self._parts)


def script_of(words: Sequence[str]) -> int | None:
    """Return the index of the script in ``sh -c SCRIPT``; None for another command."""
    names = ("sh", "bash", "ash", "dash")
    if not words or words[0].rpartition("/")[2] not in names:
        return None
    flags = next((at for at, word in enumerate(words) if word.startswith("-") and word.endswith("c")), None)
    return None if flags is None or flags + 1 >= len(words) else flags + 1


def drop_word(words: Sequence[PlacedWord], index: int, parts: ContainerParts) -> None:
    """Take the word out of the text, with the blanks or the comma before it."""
    span, before = words[index].span, words[index - 1].span if index else None
    if span is None:
        return
    if before is not None:
        parts.edits.replace(before[1], span[1], "")
    else:
        after = words[index + 1].span if index + 1 < len(words) else None
        parts.edits.replace(span[0], after[0] if after is not None else span[1], "")
