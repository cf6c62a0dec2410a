"""The simple commands in a text for a shell, by enough of POSIX's grammar to find a program and its words.

Nothing is run, and no variable or pattern is replaced. Source: POSIX.1-2017, XCU chapter 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace_migrate.report import BadInput

_BLANKS = frozenset(" \t\r")
_SEPARATORS = frozenset(";&|()\n")
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command: ``text`` without its quotes, its place in the source, and its line there, from 1."""

    text: str
    start: int
    end: int
    line: int


class NotClosed(BadInput):
    """A quotation mark or a bracket without its end. ``word`` is the place where it begins."""

    def __init__(self, reason: str, word: Word) -> None:
        super().__init__(reason, word.line)
        self.word = word


def simple_commands(source: str) -> Iterator[list[Word]]:
    """Yield the simple commands of ``source``, without redirections and comments. Raises `BadInput`."""
    yield from _Lexer(source).commands()


class _Lexer:
    def __init__(self, source: str) -> None:
        self._source, self._at, self._line = source, 0, 1
        self._ends_of_documents = list[str]()

    def commands(self) -> Iterator[list[Word]]:
        source, words, takes_target = self._source, list[Word](), ""
        while self._at < len(source):
            char = source[self._at]
            if char in _BLANKS:
                self._at += 1
            elif self._is_continued():
                self._skip_continued()
            elif char in _SEPARATORS:
                if words:
                    yield words
                words = []
                self._pass_separator(char)
            elif char == "#":
                end = source.find("\n", self._at)
                self._at = len(source) if end < 0 else end
            elif char in "<>":
                takes_target = self._operator()
            else:
                word = self._word()
                if takes_target:
                    if takes_target.startswith("<<") and takes_target != "<<<":
                        self._ends_of_documents.append(word.text)
                    takes_target = ""
                elif not (word.text.isdigit() and source[self._at : self._at + 1] in ("<", ">")):
                    words.append(word)
        if words:
            yield words

    def _is_continued(self) -> bool:
        return self._source.startswith(("\\\n", "\\\r\n"), self._at)

    def _skip_continued(self) -> None:
        self._at = self._source.index("\n", self._at) + 1
        self._line += 1

    def _pass_separator(self, char: str) -> None:
        self._at += 1
        if char != "\n":
            return
        self._line += 1
        for end in self._ends_of_documents:  # the bodies of here-documents
            while self._at < len(self._source):
                stop = self._source.find("\n", self._at)
                stop = len(self._source) if stop < 0 else stop
                body, self._at = self._source[self._at : stop], stop + 1
                self._line += 1
                if body.strip() == end:
                    break
        self._ends_of_documents.clear()

    def _operator(self) -> str:
        start = self._at
        while self._source[self._at : self._at + 1] in ("<", ">", "&", "-") and self._at - start < 3:
            self._at += 1
        return self._source[start : self._at].rstrip("-")

    def _word(self) -> Word:
        source, start, line, parts = self._source, self._at, self._line, list[str]()
        while self._at < len(source):
            char = source[self._at]
            if char in _BLANKS or char in _SEPARATORS or char in "<>":
                break
            if char == "'":
                end = self._find("'", self._at + 1)
                parts.append(self._take(end + 1)[1:-1])
            elif char == '"':
                parts.append(self._quoted())
            elif self._is_continued():
                self._skip_continued()
            elif char == "\\":
                parts.append(self._take(self._at + 2)[1:])
            elif char == "`":
                parts.append(self._take(self._find("`", self._at + 1) + 1))
            elif char == "$" and source[self._at + 1 : self._at + 2] in ("(", "{"):
                parts.append(self._expansion())
            else:
                parts.append(self._take(self._at + 1))
        return Word("".join(parts), start, self._at, line)

    def _quoted(self) -> str:
        """Return the text in double quotation marks, in which some characters may be escaped."""
        start, parts = self._at, list[str]()
        self._at += 1
        while self._source[self._at : self._at + 1] != '"':
            if self._at >= len(self._source):
                raise NotClosed(_no_end(self._source[start : start + 40]), self._here(start))
            if self._is_continued():
                self._skip_continued()
            elif self._source[self._at] == "\\" and self._source[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\"):
                parts.append(self._take(self._at + 2)[1:])
            elif self._source.startswith(("$(", "${"), self._at):
                parts.append(self._expansion())
            else:
                parts.append(self._take(self._at + 1))
        self._at += 1
        return "".join(parts)

    def _expansion(self) -> str:
        """Return ``$(...)`` or ``${...}`` as it is written."""
        opening = self._source[self._at + 1]
        closing, depth, at = _CLOSING[opening], 0, self._at + 1
        while at < len(self._source):
            depth += (self._source[at] == opening) - (self._source[at] == closing)
            at += 1
            if not depth:
                return self._take(at)
        raise NotClosed(f"'${opening}' is not closed", self._here(self._at))

    def _find(self, char: str, at: int) -> int:
        end = self._source.find(char, at)
        if end < 0:
            raise NotClosed(_no_end(self._source[at - 1 : at + 39]), self._here(at - 1))
        return end

    def _here(self, at: int) -> Word:
        return Word("", at, at, self._source.count("\n", 0, at) + 1)

    def _take(self, end: int) -> str:
        text, self._at = self._source[self._at : end], end
        self._line += text.count("\n")
        return text


def _no_end(text: str) -> str:
    return f"a quotation mark is not closed: {text.splitlines()[0]}"
