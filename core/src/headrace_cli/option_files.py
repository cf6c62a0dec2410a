"""Flags in a file: ``headrace serve @server.flags``. A secret in a file is in no list of processes and in no history.

Each line is one word of the command line, such as ``--http-port=8000``. Blank lines and lines that begin with ``#`` are
left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from headrace.config.regular_files import read_regular
from headrace.errors import ConfigError

#: A larger file is refused.
_MOST_BYTES = 1 << 20


def with_files(words: Sequence[str]) -> list[str]:
    """Return ``words`` with the lines of each file in place of ``@file``. Blocks. Raises `ConfigError`."""
    return [each for word in words for each in (_lines(word[1:]) if word.startswith("@") else (word,))]


def _lines(path: str) -> Iterator[str]:
    try:
        content = read_regular(Path(path))
        text = content.decode()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "it is no text in UTF-8"
        raise ConfigError(f"the flags in '@{path}' cannot be read: {reason}") from None
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"the flags in '@{path}' have {len(content)} bytes; the limit is {_MOST_BYTES}")
    for number, line in enumerate(text.splitlines(), 1):
        word = line.strip()
        if word.startswith("@"):
            raise ConfigError(f"'@{path}', line {number}: a file of flags names no other one")
        if word and not word.startswith("#"):
            yield word
