"""Changes to a text at known places; every other byte stays."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class TextEdits:
    """Replacements in ``text``. Spans are offsets of characters."""

    text: str
    _changes: dict[tuple[int, int], str] = field(default_factory=dict)

    def replace(self, start: int, end: int, new: str) -> None:
        """Replace ``text[start:end]``. A second replacement of the same span, or of a part of one, has no effect."""
        if not any(start < other_end and other_start < end for other_start, other_end in self._changes):
            self._changes[start, end] = new

    def replace_all(self, old: str, new: str, start: int = 0, end: int | None = None) -> bool:
        """Replace every ``old`` in ``text[start:end]``. True if there is any."""
        end, found = len(self.text) if end is None else end, False
        while old and (at := self.text.find(old, start, end)) >= 0:
            self.replace(at, at + len(old), new)
            start, found = at + len(old), True
        return found

    def result(self) -> str:
        """Return the text with all replacements."""
        parts, at = list[str](), 0
        for (start, end), new in sorted(self._changes.items()):
            parts += [self.text[at:start], new]
            at = end
        return "".join([*parts, self.text[at:]])

    def line_of(self, offset: int) -> int:
        """Return the line of ``offset``, from 1."""
        return self.text.count("\n", 0, offset) + 1
