"""The key file: principals, their keys, and what each principal is allowed.

::

    {
      "principals": {
        "alice": {
          "keys": {"k4f2a91c": {"sha256": "<64 hex digits>", "created": "2026-11-26", "expires": "2027-01-01"}},
          "allow": [{"models": ["digits*"], "operations": ["inference", "metadata"]}]
        }
      }
    }

A key is ``hr_<id>_<secret>``. The secret has 256 random bits, and the file has its SHA-256 only. A random secret of
this length cannot be guessed, so it needs no slow hash.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hmac import compare_digest
from pathlib import Path
from typing import Any

from headrace import ConfigError, Operation, one_line, read_regular

#: A larger file is refused. 10,000 principals with a key each have about 3 MB.
_MOST_BYTES = 64 << 20
_KEY = re.compile(r"hr_([0-9a-f]{8})_([A-Za-z0-9_-]{43})", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PRINCIPAL = re.compile(r"[A-Za-z0-9._@-]{1,128}", re.ASCII)
_PATTERN = re.compile(r"[A-Za-z0-9_*?.\-]{1,128}", re.ASCII)
#: Operations without a model that tell nothing about models: their names decide.
_OF_NO_MODEL = frozenset(
    (Operation.OPEN_STREAM, Operation.SERVER_METADATA, Operation.LIVE, Operation.READY, Operation.REFLECTION)
)
#: The decisions of a principal that are kept.
_KEPT_DECISIONS = 1024


def parse_patterns(text: str, where: str) -> tuple[str, ...]:
    """Return the patterns in a list such as ``infer,metadata*``. Raises `ValueError` that names ``where``."""
    return tuple(_pattern(each.strip(), where) for each in text.split(","))


def matching(patterns: Iterable[str], *names: str) -> bool:
    """True if a pattern matches one of ``names``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns for name in names if name)


@dataclass(frozen=True, slots=True)
class AccessRule:
    """Allows ``operations``, by name or category, on ``models``. Both are patterns as of a shell."""

    models: tuple[str, ...]
    operations: tuple[str, ...]

    def allows(self, operation: str, category: str, model: str) -> bool:
        """True if it allows the operation. An operation on the whole server needs the model pattern ``*``."""
        if not matching(self.operations, operation, category):
            return False
        if model:
            return matching(self.models, model)
        return operation in _OF_NO_MODEL or "*" in self.models


@dataclass(slots=True)
class Principal:
    """Who a key belongs to. Decisions are kept, because a principal asks for few models again and again."""

    name: str
    rules: Sequence[AccessRule]
    _decided: dict[tuple[str, str], bool] = field(default_factory=dict)

    def may(self, operation: str, category: str, model: str) -> bool:
        """True if a rule allows the operation."""
        found = self._decided.get((operation, model))
        if found is None:
            found = any(rule.allows(operation, category, model) for rule in self.rules)
            if len(self._decided) >= _KEPT_DECISIONS:
                self._decided.clear()
            self._decided[operation, model] = found
        return found


@dataclass(frozen=True, slots=True)
class Key:
    """One key, by the digest of its secret. ``expires`` is the first day on which it is refused."""

    digest: bytes
    principal: Principal
    expires: datetime.date | None = None


class KeyFile:
    """The keys of a file. Any thread."""

    def __init__(self, keys: Mapping[str, Key]) -> None:
        self._keys = keys

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, given: str) -> Principal | str:
        """Return the principal of the key ``given``, or why there is none.

        The time to compare a secret does not depend on its content.
        """
        parts = _KEY.fullmatch(given)
        if parts is None:
            return "it is no key of this server"
        known = self._keys.get(parts[1])
        digest = hashlib.sha256(parts[2].encode()).digest()
        if known is None or not compare_digest(digest, known.digest):
            return "it is not known"
        if known.expires is not None and _today() >= known.expires:
            return "it has expired"
        return known.principal

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Read the file. Blocks. Raises `ConfigError` with the place in the file, and never with a digest."""
        return cls.parse(load_document(path), path)

    @classmethod
    def parse(cls, document: Mapping[str, Any], path: Path) -> KeyFile:
        """Return the keys in ``document``, which is the content of ``path``. Raises `ConfigError`."""
        keys: dict[str, Key] = {}
        try:
            for name, given in _object(document["principals"], "principals").items():
                where = f"principals.{one_line(name)}"
                if not _PRINCIPAL.fullmatch(name):
                    raise ValueError(f"{where}: a principal has 1 to 128 of A-Z, a-z, 0-9 and . _ @ -")
                _known(given, where, "keys", "allow")
                principal = Principal(name, _rules(given.get("allow"), f"{where}.allow"))
                for key_id, key in _object(given.get("keys", {}), f"{where}.keys").items():
                    if key_id in keys:
                        raise ValueError(f"{where}.keys: the id '{one_line(key_id)}' belongs to another key, too")
                    keys[key_id] = _key(key, principal, f"{where}.keys.{one_line(key_id)}")
        except KeyError as error:
            raise ConfigError(f"key file '{path}': {error} is missing") from None
        except ValueError as error:
            raise ConfigError(f"key file '{path}': {error}") from None
        return cls(keys)


def load_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file. Blocks. Raises `ConfigError`."""
    try:
        content = read_regular(path)
    except OSError as error:
        raise ConfigError(f"key file '{path}' cannot be read: {error.strerror}") from error
    if len(content) > _MOST_BYTES:
        raise ConfigError(f"key file '{path}' has {len(content)} bytes; the limit is {_MOST_BYTES}")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"key file '{path}' is no JSON: {one_line(str(error))}") from None
    if not isinstance(found, dict) or found.keys() != {"principals"}:
        raise ConfigError(f"key file '{path}' is no object with the one member 'principals'")
    return found


def new_key() -> tuple[str, str, str]:
    """Return a new key, its id, and the digest for the file."""
    key_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    return f"hr_{key_id}_{secret}", key_id, hashlib.sha256(secret.encode()).hexdigest()


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.timezone.utc).date()


def _key(given: Any, principal: Principal, where: str) -> Key:
    _known(given, where, "sha256", "created", "expires", "note")
    digest = given.get("sha256")
    if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise ValueError(f"{where}.sha256 is not 64 hexadecimal digits")
    expires = given.get("expires")
    try:
        day = None if expires is None else datetime.date.fromisoformat(expires)
    except (TypeError, ValueError):
        raise ValueError(f"{where}.expires is {one_line(repr(expires))}; expected a day such as 2027-01-31") from None
    return Key(bytes.fromhex(digest), principal, day)


def _rules(given: Any, where: str) -> list[AccessRule]:
    if not isinstance(given, list):
        raise ValueError(f"{where} is no list of rules, each with 'models' and 'operations'")
    rules = []
    for number, each in enumerate(given):
        place = f"{where}[{number}]"
        _known(each, place, "models", "operations")
        models, operations = (_patterns(each.get(name), f"{place}.{name}") for name in ("models", "operations"))
        rules.append(AccessRule(models, operations))
    return rules


def _patterns(given: Any, where: str) -> tuple[str, ...]:
    if not isinstance(given, list) or not given or not all(isinstance(each, str) for each in given):
        raise ValueError(f"{where} is no list of patterns, such as ['digits*']")
    return tuple(_pattern(each, where) for each in given)


def _pattern(text: str, where: str) -> str:
    if not _PATTERN.fullmatch(text):
        raise ValueError(f"{where}: '{one_line(text)}' is no pattern: 1 to 128 of A-Z, a-z, 0-9 and _ . - * ?")
    return text


def _object(given: Any, where: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ValueError(f"{where} is no object")
    return given


def _known(given: Any, where: str, *names: str) -> None:
    unknown = sorted(_object(given, where).keys() - set(names))
    if unknown:
        raise ValueError(f"{where}: unknown member '{one_line(unknown[0])}'; known: {', '.join(names)}")
