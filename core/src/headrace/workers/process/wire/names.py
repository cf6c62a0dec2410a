"""Lists of names in a message: UTF-8, with a separator that no name in a config has."""

from __future__ import annotations

from typing import Final

from headrace.workers.process.wire.remembered import remember

_SEPARATOR: Final = "\0"


class NamesWriter:
    """Writes lists of names."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], bytes] = {}

    def write(self, names: tuple[str, ...]) -> bytes:
        text = self._known.get(names)
        if text is None:
            text = _SEPARATOR.join(names).encode()
            remember(self._known, names, text)
        return text


class NamesReader:
    """Reads lists of names."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[str, ...]] = {}

    def read(self, text: bytes) -> tuple[str, ...]:
        names = self._known.get(text)
        if names is None:
            names = tuple(str(text, "utf-8").split(_SEPARATOR))
            remember(self._known, text, names)
        return names
