"""Restricted APIs: categories of calls that need a header with a secret value.

Source: docs/spec/behaviours.md sections 1.2 and 2.2. What a refusal looks like is the transport's affair;
whether there is one is decided here, for every frontend alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from hmac import compare_digest

from headrace.config.options import Restriction


class Restrictions:
    """Which categories are locked, and whether a call brings the key."""

    def __init__(self, rules: Mapping[str, Restriction], noun: str = "API") -> None:
        """``noun`` is what the refusal calls the thing that is restricted."""
        self._noun = noun
        self._rules = {
            category: (rule.header.lower(), rule.value.encode(), rule.header) for category, rule in rules.items()
        }

    def __bool__(self) -> bool:
        """Whether anything is restricted."""
        return bool(self._rules)

    def covers(self, category: str) -> bool:
        """Whether calls of ``category`` need a key at all."""
        return category in self._rules

    def refusal(self, category: str, header: Callable[[str], bytes | str | None]) -> str | None:
        """Why a call of ``category`` is refused, or None. ``header`` looks up a lower-case name.

        The answer names the header and never its value, and takes the same time for every wrong one.
        """
        rule = self._rules.get(category)
        if rule is None:
            return None
        name, expected, shown = rule
        given = header(name)
        if given is not None and compare_digest(given.encode() if isinstance(given, str) else given, expected):
            return None
        return f"This {self._noun} is restricted, expecting header '{shown}'"
