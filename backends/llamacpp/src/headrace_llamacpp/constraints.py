"""Constraints of the text: from ``structured_outputs`` to grammars of llguidance, which llama.cpp runs.

All of them use llguidance. llama.cpp's own grammars are not used: one of 60 lines can block all slots for ever.

| Danger | Guard |
|---|---|
| Compiling a grammar takes all memory, and ends the process | `GrammarChecker` compiles it first, within limits |
| llama.cpp has an older copy of llguidance, without some limits | `check_schema` |
| llama.cpp drops a grammar that becomes too complex, and only logs it | `TextGuard` compares the text with it |
| llama.cpp gives llguidance the tokens of SentencePiece without their spaces | `TextGuard` |
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Final

from headrace import BackendError, InvalidArgument, one_line
from headrace_llamacpp.checker_process import GrammarChecker
from headrace_llamacpp.repetitions import check_lark, check_regex

_HEADER = "%llguidance {}\n"
#: The most grammars that are kept as good.
_REMEMBERED = 256
_TOO_COMPLEX: Final = "takes the grammar for too complex"


def grammar_of(structured: Mapping[str, Any]) -> str:
    """Return the grammar for ``structured``, one member of ``structured_outputs``; empty if there is none.

    Raises `InvalidArgument` for a grammar that cannot be read. It has not been compiled yet.
    """
    for kind, value in structured.items():
        if kind == "json":
            schema = value if type(value) is not str else _parsed(value)
            check_schema(schema, "structured_outputs.json")
            return f"{_HEADER}start: %json {json.dumps(schema, ensure_ascii=False)}"
        if kind == "json_object":
            return f'{_HEADER}start: %json {{"type": "object"}}'
        if kind == "regex":
            check_regex(value, "structured_outputs.regex")
            return f"{_HEADER}start: /{_as_lark_pattern(value)}/"
        if kind == "choice":
            return f"{_HEADER}start: " + " | ".join(_literal(each) for each in value)
        return _HEADER + _as_lark(value)
    return ""


#: Keywords of JSON schemas with a count.
_COUNTS: Final = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))
#: The most of such a count: a grammar has a copy of the item for each, and memory that is missing ends the process.
_MOST_COUNT: Final = 1000
#: The most members of a schema whose references are replaced by what they name, and how deep these may be nested.
_MOST_MEMBERS, _MOST_REFERENCES = 100_000, 100
#: The most characters of all patterns of a schema.
_MOST_PATTERNS: Final = 64 << 10


def check_schema(schema: Any, owner: str) -> None:
    """Raise `InvalidArgument` with the name of its ``owner`` if ``schema`` is small and its grammar is not.

    A chain of 60 definitions, each of which refers to the next one twice, has 2^60 members.
    """
    _Expansion(schema, owner).size(schema, 0)


class _Expansion:
    """Counts the members of the schema ``root``, with references replaced."""

    def __init__(self, root: Any, owner: str) -> None:
        self._root, self._owner = root, owner
        #: The size of what each reference names; 1 while it is counted, for one that refers to itself.
        self._named: dict[str, int] = {}
        self._pattern_size = 0

    def size(self, schema: Any, references: int) -> int:
        if type(schema) is list:
            return self._sum([self.size(each, references) for each in schema])
        if type(schema) is not dict:
            return 1
        for name in _COUNTS & schema.keys():
            if type(schema[name]) in (int, float) and schema[name] > _MOST_COUNT:
                raise InvalidArgument(f"{self._owner} has {name} {schema[name]}, the limit is {_MOST_COUNT}")
        for pattern in _patterns(schema):
            self._pattern_size += len(pattern)
            if self._pattern_size > _MOST_PATTERNS:
                raise InvalidArgument(f"{self._owner} has patterns of more than {_MOST_PATTERNS} characters")
            check_regex(pattern, f"a pattern of {self._owner}")
        sizes = [self.size(each, references) for each in schema.values()]
        if type(schema.get("$ref")) is str:
            sizes.append(self._referenced(schema["$ref"], references + 1))
        return self._sum(sizes)

    def _referenced(self, reference: str, references: int) -> int:
        if references > _MOST_REFERENCES:
            raise InvalidArgument(
                f"{self._owner} has {references} references in each other, the limit is {_MOST_REFERENCES}"
            )
        if reference not in self._named:
            self._named[reference] = 1
            self._named[reference] = self.size(self._find(reference), references)
        return self._named[reference]

    def _find(self, reference: str) -> Any:
        found = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if type(found) is dict else None
        return found

    def _sum(self, sizes: list[int]) -> int:
        total = 1 + sum(sizes)
        if total > _MOST_MEMBERS:
            raise InvalidArgument(
                f"{self._owner} has more than {_MOST_MEMBERS} members, counting those of its references"
            )
        return total


def _patterns(schema: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of ``schema`` itself."""
    keys = schema.get("patternProperties")
    found = [schema.get("pattern"), *(keys if type(keys) is dict else ())]
    return [each for each in found if type(each) is str]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"structured_outputs.json is not JSON: {error}") from None


def _literal(text: str) -> str:
    if not text:
        raise InvalidArgument("structured_outputs.choice has an empty string")
    return json.dumps(text, ensure_ascii=False)


def _as_lark_pattern(pattern: str) -> str:
    """Return ``pattern`` as it stands between slashes: without bare slashes and line ends."""
    bare = re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
    return bare.replace("\n", r"\n").replace("\r", r"\r")


def _as_lark(grammar: str) -> str:
    """Return ``grammar``, which is in llama.cpp's GBNF or in llguidance's form of Lark, in the latter."""
    from llguidance.gbnf_to_lark import any_to_lark

    grammar = grammar.removeprefix("%llguidance {}")
    try:
        lark = str(any_to_lark(grammar))
    except RecursionError:
        raise InvalidArgument("structured_outputs.grammar is nested too deeply") from None
    except Exception as error:  # the converter raises `Exception` itself for an unknown rule
        raise InvalidArgument(f"structured_outputs.grammar is not valid: {one_line(str(error))[:300]}") from None
    lark = lark.removeprefix("%llguidance {}").lstrip()
    check_lark(lark, "structured_outputs.grammar")
    return lark


class Constraints:
    """Compiles grammars, and keeps those that are good. Any thread.

    ``has_space_prefix`` is that of the model's tokens, see `headrace_llamacpp.gguf.GgufHeader`.
    """

    def __init__(self, has_space_prefix: bool) -> None:
        self._why = "reads the spaces in the tokens of this model wrong" if has_space_prefix else _TOO_COMPLEX
        self._checker = GrammarChecker()
        self._good: OrderedDict[str, None] = OrderedDict()

    def check(self, grammar: str) -> None:
        """Raise `InvalidArgument` with the reason if ``grammar`` cannot be used. May wait for seconds."""
        if grammar in self._good:
            return
        if reason := self._checker.why_bad(grammar):
            raise InvalidArgument(f"structured_outputs cannot be used: {reason}")
        self._good[grammar] = None
        while len(self._good) > _REMEMBERED:
            self._good.popitem(last=False)

    def guard(self, grammar: str) -> TextGuard:
        """Return the guard of one answer with ``grammar``, which has been checked."""
        return TextGuard(grammar, self._why)

    def close(self) -> None:
        self._checker.close()


class TextGuard:
    """Compares the text of one answer with its grammar. One thread. ``why`` is said if they do not fit."""

    def __init__(self, grammar: str, why: str) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self._why = why
        self._matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0)

    def add(self, text: str) -> None:
        """Raise `BackendError` if the text so far, with ``text`` at its end, is not the beginning of one that fits."""
        if text and not self._matcher.consume_tokens(list(text.encode())):
            raise BackendError(f"llama.cpp did not keep to structured_outputs: it {self._why}, at {text[:40]!r}")

    def end(self) -> None:
        """Raise `BackendError` if the text must go on."""
        if not self._matcher.is_accepting():
            raise BackendError(f"llama.cpp ended a text before structured_outputs allows it: it {self._why}")
