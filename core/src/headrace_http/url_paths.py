"""Paths with placeholders, and what a path names.

``{name}`` is one segment, ``{version}`` a segment of digits. A part in brackets may be missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

MODEL = "/v2/models/{name}[/versions/{version}]"
_REPOSITORY = "/v2/repository[/{repository}]"
SERVER, LIVE, READY = "/v2", "/v2/health/live", "/v2/health/ready"
ALL_STATISTICS, STATISTICS = "/v2/models/stats", f"{MODEL}/stats"
EXPLAIN = f"{MODEL}/explain"  # not in Triton
INFER = f"{MODEL}/infer"
MODEL_READY, CONFIG = f"{MODEL}/ready", f"{MODEL}/config"
INDEX = f"{_REPOSITORY}/index"
LOAD, UNLOAD = f"{_REPOSITORY}/models/{{name}}/load", f"{_REPOSITORY}/models/{{name}}/unload"
_PLACEHOLDER = re.compile(r"{(\w+)}")
#: The valid text between two slashes.
_SEGMENT = re.compile(r"{[A-Za-z_]\w*}|[\w.~!$&'()*+,;=:@-]+", re.ASCII)


#: Brackets in pairs, not nested.
_BRACKETS = re.compile(r"[^][]*(\[[^][]*\][^][]*)*")


class PathTarget(NamedTuple):
    """The target of a path. ``name`` is a model or a shared-memory region, ``version`` its digits; empty for none.

    ``values`` are those of all placeholders.
    """

    name: str = ""
    version: str = ""
    repository: str = ""
    values: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class PathTemplate:
    """``text``, parsed."""

    text: str
    pattern: re.Pattern[str] = field(init=False)
    _variants: tuple[list[str], ...] = field(init=False)

    def __post_init__(self) -> None:
        parts = _PLACEHOLDER.split(self.text)
        for at, part in enumerate(parts):
            if at % 2:
                parts[at] = f"(?P<{part}>{'[0-9]+' if part == 'version' else '[^/]+'})"
            else:
                parts[at] = re.escape(part).replace(r"\[", "(?:").replace(r"\]", ")?")
        object.__setattr__(self, "pattern", re.compile("".join(parts)))
        object.__setattr__(self, "_variants", tuple(variant.split("/") for variant in _spread(self.text)))

    def overlaps(self, other: PathTemplate) -> bool:
        """True if there is a path that both match."""
        return any(_overlap(one, two) for one in self._variants for two in other._variants)


#: There are few templates.
template = lru_cache(256)(PathTemplate)


@lru_cache(256)
def read_path(path: str) -> PathTemplate:
    """Return the template of ``path``. Raises TypeError if it is invalid."""
    for variant in _spread(path) if _BRACKETS.fullmatch(path) else [""]:
        root, *segments = variant.split("/")
        if len(segments) > 1 and not segments[-1]:
            segments.pop()  # a slash at the end
        if root or not segments or not all(map(_SEGMENT.fullmatch, segments)):
            raise TypeError(
                f"the path {path!r} is not '/', words and placeholders like {{name}}, with '/' between them or at "
                "the end; optional parts are in brackets"
            )
    names = _PLACEHOLDER.findall(path)
    if len(names) > len(set(names)):
        raise TypeError(f"the path {path!r} has a placeholder twice")
    return template(path)


def _spread(text: str) -> list[str]:
    """Return ``text`` with and without the part in each pair of brackets."""
    head, bracket, rest = text.partition("[")
    if not bracket:
        return [text]
    inside, _, tail = rest.partition("]")
    return _spread(head + tail) + _spread(head + inside + tail)


def _overlap(one: list[str], two: list[str]) -> bool:
    return len(one) == len(two) and all(map(_may_be_one, one, two))


def _may_be_one(one: str, two: str) -> bool:
    if one[:1] == "{" or two[:1] == "{":
        literal = two if one[:1] == "{" else one
        if not literal:
            return False
        return literal[:1] == "{" or "{version}" not in (one, two) or (literal.isascii() and literal.isdigit())
    return one == two
