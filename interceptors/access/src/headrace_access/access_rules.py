"""Rules: the operations that a principal may do on models. And checks of the members of the access file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from headrace import Operation, one_line

_PATTERN = re.compile(r"[A-Za-z0-9_*?.\-]{1,128}", re.ASCII)
#: The default operations of a new principal of `headrace keys`.
OPERATIONS_OF_NEW = "inference,metadata,model-config,health"
#: The maximum length of a token. A longer one is refused unread.
MAX_CHARACTERS = 8192
#: The maximum length of the name of a principal or a role.
_LONGEST_NAME = 256
#: Operations that reveal nothing about models: a rule for them needs no model.
_OF_NO_MODEL = frozenset(
    (Operation.OPEN_STREAM, Operation.SERVER_METADATA, Operation.LIVE, Operation.READY, Operation.REFLECTION)
)
#: The maximum number of cached decisions of a principal.
_MAX_DECISIONS = 1024


@dataclass(frozen=True, slots=True)
class AccessRule:
    """Allows ``operations``, by name or category, on ``models``. Both are shell patterns."""

    models: tuple[str, ...]
    operations: tuple[str, ...]

    def __str__(self) -> str:
        return f"{','.join(self.operations)} on {','.join(self.models)}"

    def allows(self, operation: str, category: str, model: str, has_parts: bool = False) -> bool:
        """True if it allows the operation.

        An operation on the whole server needs the model pattern ``*``. If it ``has_parts``, each part is checked
        instead.
        """
        if not matching(self.operations, operation, category):
            return False
        if model:
            return matching(self.models, model)
        return has_parts or operation in _OF_NO_MODEL or "*" in self.models


@dataclass(slots=True)
class Principal:
    """A principal with its rules, and a cache of their decisions."""

    name: str
    rules: Sequence[AccessRule]
    _decided: dict[tuple[str, str], bool] = field(default_factory=dict)

    def may(self, operation: str, category: str, model: str, has_parts: bool = False) -> bool:
        """True if a rule allows the operation."""
        found = self._decided.get((operation, model))
        if found is None:
            found = any(rule.allows(operation, category, model, has_parts) for rule in self.rules)
            if len(self._decided) >= _MAX_DECISIONS:
                self._decided.clear()
            self._decided[operation, model] = found
        return found


class Verified(NamedTuple):
    """The principal of a valid credential. ``until_s`` is its end in seconds since 1970, 0 for a certificate."""

    principal: Principal
    until_s: float


def matching(patterns: Iterable[str], *names: str) -> bool:
    """True if a pattern matches one of ``names``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names if name)


def is_name(text: object) -> bool:
    """True if ``text`` can name a principal or a role. Names appear in logs, errors and metrics."""
    return isinstance(text, str) and 0 < len(text) <= _LONGEST_NAME and text.isprintable() and text == text.strip()


# ---------------------------------------------------------------------- members of the file. All raise `ValueError`.


def parse_patterns(text: str, where: str) -> tuple[str, ...]:
    """Return the patterns in a list such as ``infer,metadata*``. Raises `ValueError` that names ``where``."""
    return tuple(_pattern(each.strip(), where) for each in text.split(","))


def read_rules(value: Any, where: str) -> tuple[AccessRule, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{where} is no list of rules, each with 'models' and 'operations'")
    rules = []
    for number, each in enumerate(value):
        place = f"{where}[{number}]"
        known_members(each, place, "models", "operations")
        models, operations = (_patterns(each.get(name), f"{place}.{name}") for name in ("models", "operations"))
        rules.append(AccessRule(models, operations))
    return tuple(rules)


def read_name(value: object, where: str) -> str:
    """Return ``value``, the name of a principal or a role."""
    if not is_name(value):
        raise ValueError(f"{where} is no name: 1 to {_LONGEST_NAME} printable characters, without blanks around them")
    return str(value)


def members(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no object")
    return value


def known_members(value: Any, where: str, *names: str) -> dict[str, Any]:
    """Return the members of ``value``. All their names must be in ``names``."""
    unknown = sorted(members(value, where).keys() - set(names))
    if unknown:
        raise ValueError(f"{where}: unknown member '{one_line(unknown[0])}'; known: {', '.join(names)}")
    return members(value, where)


def text_list(value: Any, where: str, example: str) -> tuple[str, ...]:
    """Return ``value``, a list of at least one text, none of them empty."""
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        raise ValueError(f"{where} is no list such as {example}")
    return tuple(value)


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{where} is no list of patterns, such as ['digits*']")
    return tuple(_pattern(each, where) for each in value)


def _pattern(text: str, where: str) -> str:
    if not _PATTERN.fullmatch(text):
        raise ValueError(f"{where}: '{one_line(text)}' is no pattern: 1 to 128 of A-Z, a-z, 0-9 and _ . - * ?")
    return text
