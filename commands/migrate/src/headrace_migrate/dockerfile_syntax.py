"""The instructions of a Dockerfile, with their places. Source: Docker's Dockerfile reference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from headrace_migrate.report import BadInput

_ESCAPE = re.compile(r"\s*#\s*escape\s*=\s*([\\`])\s*$", re.IGNORECASE)
_DIRECTIVE = re.compile(r"\s*#\s*\w+\s*=")
_HEREDOC = re.compile(r"<<-?\s*([\"']?)([A-Za-z_]\w*)\1")
_NAME = re.compile(r"\s*([A-Za-z]+)\s+")
#: The instructions after which a here-document may follow.
_WITH_HEREDOC = ("RUN", "COPY", "ADD")
NAMES = frozenset(
    (
        *("FROM", "ARG", "ENV", "RUN", "CMD", "ENTRYPOINT", "COPY", "ADD", "LABEL", "EXPOSE", "WORKDIR", "USER"),
        *("VOLUME", "HEALTHCHECK", "SHELL", "STOPSIGNAL", "ONBUILD", "MAINTAINER"),
    )
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction: its ``name`` in capitals, and its ``body``, which begins at the offset ``start`` of the file.

    In the body, comment lines are blanks and lines continue as in a shell.
    ``line`` is the first line, from 1; ``end`` the offset of the first character after the instruction.
    """

    name: str
    body: str
    start: int
    end: int
    line: int


def read_instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of the Dockerfile ``text``. Raises `BadInput` with the line."""
    lines = text.splitlines(keepends=True)
    escape = _escape_of(lines)
    number = offset = 0
    while number < len(lines):
        first, start, parts = number, offset, list[str]()
        while number < len(lines):
            line = lines[number]
            number, offset = number + 1, offset + len(line)
            if not line.strip() or line.lstrip().startswith("#"):
                if parts:  # among continued lines
                    parts.append(" " * len(line))
                else:
                    first, start = number, offset
                continue
            stripped = line.rstrip()
            is_continued = stripped.endswith(escape)
            parts.append(_shell_line(line, len(stripped)) if is_continued else line)
            if not is_continued:
                break
        if not parts:
            return
        raw = "".join(parts)
        found = _NAME.match(raw)
        name = found[1].upper() if found else raw.strip().upper()
        if found is None or name not in NAMES:
            raise BadInput(f"'{raw.strip()[:40]}' is no instruction of a Dockerfile", first + 1)
        for end in _HEREDOC.findall(raw) if name in _WITH_HEREDOC else ():
            number, offset = _skip_heredoc(lines, number, offset, end[1])
        yield Instruction(name, raw[found.end() :], start + found.end(), offset, first + 1)


def _escape_of(lines: list[str]) -> str:
    for line in lines:
        if found := _ESCAPE.match(line):
            return found[1]
        if not _DIRECTIVE.match(line):
            break
    return "\\"


def _skip_heredoc(lines: list[str], number: int, offset: int, end: str) -> tuple[int, int]:
    """Return the line and the offset behind the here-document. Raises `BadInput` if it has no end."""
    for at in range(number, len(lines)):
        offset += len(lines[at])
        if lines[at].strip() == end:
            return at + 1, offset
    raise BadInput(f"the here-document '{end}' has no end", number)


def _shell_line(line: str, length: int) -> str:
    """Return the continued ``line``, which ends with its escape character at ``length``, as a shell continues it.

    It keeps its length, so that places in it are places in the file.
    """
    return line if line[length - 1 :] == "\\\n" else line[: length - 1].ljust(len(line))
