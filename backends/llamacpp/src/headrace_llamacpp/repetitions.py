"""The length of the text that a regular expression, or a terminal of a grammar, forces by repetitions.

If only one text matches, llguidance writes it at once: a million characters for ``((a{100}){100}){100}``. The copy in
llama.cpp then takes minutes, and blocks all slots. So an upper bound of the length is computed first: that of the
longest alternative, with each part as often as it is required.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from headrace import InvalidArgument

#: The most characters. llama.cpp takes about 0.1 s for them; its time grows with their square.
MOST_FORCED: Final = 10_000

#: A token of a regular expression. Without a name, it is one character, or a class of them. A token that is not closed
#: ends with the text, so that the time is proportional to its length.
_REGEX: Final = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\\?(?:\]|\Z)|(?P<begin>\()(?:\?[^:)]{0,40}:)?|(?P<end>\))|(?P<or>\|)|"
    r"\{(?P<count>\d{1,9})\d*(?:,\d*)?\}|.",
    re.DOTALL,
)
#: A token of llguidance's form of Lark. A count may also be ``~ 3``, and a group ``[...]``, which is optional.
_LARK: Final = re.compile(
    r'"(?P<string>(?:\\.|[^"\\])*)\\?(?:"|\Z)|//[^\n]*|/(?P<regex>(?:\\.|[^/\\\n])+)\\?(?:/|(?=\n)|\Z)|'
    r"(?P<name>[A-Za-z_]\w*)|(?P<begin>[(\[])|(?P<end>[)\]])|(?P<or>\|)|(?:\{|~)\s*(?P<count>\d{1,9})\d*|.",
    re.DOTALL,
)
_RULE: Final = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:", re.MULTILINE)


def check_regex(pattern: str, owner: str) -> None:
    """Raise `InvalidArgument` with the name of its ``owner`` if ``pattern`` may force more than `MOST_FORCED`."""
    if "{" in pattern:
        _check(_length(pattern, _REGEX, {}, {}), owner)


def check_lark(grammar: str, owner: str) -> None:
    """Raise `InvalidArgument` with the name of its ``owner`` if a terminal of ``grammar`` may force too much.

    llguidance itself bounds what rules force, whose names are in lower case.
    """
    rules = _RULE.split(grammar)
    texts = dict(zip(rules[1::2], rules[2::2], strict=True))
    known: dict[str, int] = {}
    try:
        for name in texts:
            if _is_terminal(name):
                _check(_named(name, texts, known), owner)
        for token in _LARK.finditer(grammar):  # a string may be the pattern of a %json or %regex
            if pattern := token["regex"] or token["string"]:
                check_regex(pattern, owner)
    except RecursionError:
        raise InvalidArgument(f"{owner} has too many terminals in each other") from None


def _check(length: int, owner: str) -> None:
    if length > MOST_FORCED:
        raise InvalidArgument(f"{owner} may repeat {length} characters, the limit is {MOST_FORCED}")


def _length(text: str, tokens: re.Pattern[str], rules: Mapping[str, str], known: dict[str, int]) -> int:
    """Return the length of ``text``. ``known`` are the lengths of the terminals of ``rules`` that are counted."""
    groups: list[tuple[int, int]] = []  # of the outer groups, the longest alternative and the length so far
    longest = length = last = 0
    for token in tokens.finditer(text):
        kind = token.lastgroup
        if kind == "count":
            length -= last
            last *= int(token["count"])
        elif kind == "begin":
            groups.append((longest, length))
            longest = length = last = 0
            continue
        elif kind == "or":
            longest, length, last = max(longest, length), 0, 0
        elif kind == "end":
            last = max(longest, length)
            longest, length = groups.pop() if groups else (0, 0)
        elif kind == "string":
            last = len(token["string"])
        elif kind == "regex":
            last = _length(token["regex"], _REGEX, {}, {})
        elif kind == "name":
            last = _named(token["name"], rules, known)
        elif tokens is _LARK and token[0].isspace():
            continue
        else:
            last = 1
        length += last
    return max(longest, length)


def _is_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _named(name: str, rules: Mapping[str, str], known: dict[str, int]) -> int:
    """Return the length of the terminal ``name``; 1 of a rule, and of a terminal that refers to itself."""
    if name not in known:
        known[name] = 1
        if _is_terminal(name) and name in rules:
            known[name] = _length(rules[name], _LARK, rules, known)
    return known[name]
