"""The access file: principals, their keys and their rules.

::

    {
      "principals": {
        "alice": {
          "keys": {"4f2a91c0": {"sha256": "<64 hex digits>", "created": "2026-11-26", "expires": "2027-01-01"}},
          "roles": ["scientists"],
          "allow": [{"models": ["digits*"], "operations": ["inference", "metadata"]}]
        }
      },
      "roles": {"scientists": [{"models": ["*"], "operations": ["metadata"]}]},
      "issuers": {"https://login.example.com": {...}},          (issuers)
      "certificates": {"roles": "organizationalUnitName"}
    }

A key is ``hr_<id>_<secret>``. The secret has 256 random bits, and the file has only its SHA-256. Such a secret cannot
be guessed, so it needs no slow hash.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import re
import secrets
import time
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from hmac import compare_digest
from pathlib import Path
from typing import Any

from headrace import ConfigError, one_line, open_regular
from headrace_access.access_rules import (
    AccessRule,
    Principal,
    known_members,
    matching,
    members,
    read_name,
    read_rules,
    text_list,
)
from headrace_access.issuers import Issuer, read_issuer

#: A larger file is refused. 10,000 principals with one key each take about 3 MB.
_MAX_BYTES = 16 << 20
_KEY = re.compile(r"hr_([0-9a-f]{8})_([A-Za-z0-9_-]{43})", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}", re.ASCII)
#: `KeyFile.allowed_callers` names at most this many principals.
_MAX_NAMES = 20
_MEMBERS = ("principals", "roles", "issuers", "certificates")


@dataclass(frozen=True, slots=True)
class Key:
    """One key, by the digest of its secret. ``expires`` is the first day on which it is refused."""

    digest: bytes
    principal: Principal
    expires: datetime.date | None = None

    @property
    def until_s(self) -> float:
        """The end of its last valid day, UTC, in seconds since 1970."""
        if self.expires is None:
            return math.inf
        return datetime.datetime.combine(self.expires, datetime.time(), datetime.timezone.utc).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFile:
    """The content of a file. Any thread."""

    keys: Mapping[str, Key]
    principals: Mapping[str, Principal]
    roles: Mapping[str, tuple[AccessRule, ...]] = field(default_factory=dict)
    #: The issuers of tokens, by ``iss``.
    issuers: Mapping[str, Issuer] = field(default_factory=dict)
    #: True if the common name of a verified certificate is accepted as a principal.
    accepts_certificates: bool = False
    #: The attribute of a certificate's subject that names roles; empty for none.
    role_attribute: str = ""

    def __len__(self) -> int:
        return len(self.keys)

    def find(self, text: str) -> Key | str:
        """Return the entry of a key, or the reason why it is refused. Secrets are compared in constant time."""
        parts = _KEY.fullmatch(text)
        if parts is None:
            return "it is no key of this server"
        known = self.keys.get(parts[1])
        digest = hashlib.sha256(parts[2].encode()).digest()
        if known is None or not compare_digest(digest, known.digest):
            return "it is not known"
        return known if time.time() < known.until_s else "it has expired"

    def named(self, name: str, roles: Iterable[str] = ()) -> Principal:
        """Return the principal ``name``, with the rules of ``roles``. The file need not have the name."""
        own = self.principals.get(name)
        added = [rule for role in roles for rule in self.roles.get(role, ())]
        if own is not None and not added:
            return own
        return Principal(name, (*(() if own is None else own.rules), *added))

    def holder(self, name: str, certificate: Mapping[str, Any]) -> Principal:
        """Return the principal whose ``certificate`` has the common name ``name``."""
        subject = [pair for pairs in certificate.get("subject", ()) for pair in pairs]
        return self.named(name, (value for attribute, value in subject if attribute == self.role_attribute))

    def allowed_callers(self, operation: str, category: str) -> str:
        """Return in words who may do the operation on any model: principals, and roles of tokens and certificates."""
        roles = self.roles if self.issuers or self.role_attribute else {}
        holders: dict[str, Mapping[str, Iterable[AccessRule]]] = {
            "principals": {name: principal.rules for name, principal in self.principals.items()},
            "roles": roles,
        }
        found = []
        for kind, rules_of in holders.items():
            names = sorted(
                name
                for name, rules in rules_of.items()
                if any(matching(rule.operations, operation, category) for rule in rules)
            )
            more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
            found += [f"{kind}: {', '.join(names[:_MAX_NAMES])}{more}"] if names else []
        return " or ".join(found) or "nobody"

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Read the file. Blocks. Raises `ConfigError` with the place in the file, but never with a digest."""
        return cls.parse(load_document(path), path)

    @classmethod
    def parse(cls, document: Mapping[str, Any], path: Path) -> KeyFile:
        """Return the content of ``document``, read from ``path``. Blocks if it names files. Raises `ConfigError`."""
        try:
            return cls._parse(document, path)
        except KeyError as error:
            raise ConfigError(f"access file '{path}': {error} is missing") from None
        except ValueError as error:
            raise ConfigError(f"access file '{path}': {error}") from None

    @classmethod
    def _parse(cls, document: Mapping[str, Any], path: Path) -> KeyFile:
        roles = {
            read_name(name, f"roles.{one_line(name)}"): read_rules(rules, f"roles.{one_line(name)}")
            for name, rules in members(document.get("roles", {}), "roles").items()
        }
        principals: dict[str, Principal] = {}
        keys: dict[str, Key] = {}
        for name, entry in members(document["principals"], "principals").items():
            where = f"principals.{one_line(name)}"
            read_name(name, where)
            known_members(entry, where, "keys", "roles", "allow")
            rules = read_rules(entry.get("allow", []), f"{where}.allow")
            for role in text_list(entry["roles"], f"{where}.roles", "['scientists']") if "roles" in entry else ():
                if role not in roles:
                    raise ValueError(f"{where}.roles: there is no role '{one_line(role)}'")
                rules += roles[role]
            principals[name] = principal = Principal(name, rules)
            for key_id, key in members(entry.get("keys", {}), f"{where}.keys").items():
                if key_id in keys:
                    raise ValueError(f"{where}.keys: the id '{one_line(key_id)}' belongs to another key, too")
                keys[key_id] = _key(key, principal, f"{where}.keys.{one_line(key_id)}")
        issuers = {
            name: read_issuer(name, entry, path.parent)
            for name, entry in members(document.get("issuers", {}), "issuers").items()
        }
        certificates = document.get("certificates")
        attribute = (
            "" if certificates is None else known_members(certificates, "certificates", "roles").get("roles", "")
        )
        if not isinstance(attribute, str):
            raise ValueError("certificates.roles is no attribute, such as 'organizationalUnitName'")
        return cls(
            keys=keys,
            principals=principals,
            roles=roles,
            issuers=issuers,
            accepts_certificates=certificates is not None,
            role_attribute=attribute,
        )


def load_document(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file. Blocks. Raises `ConfigError`."""
    try:
        with open_regular(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"access file '{path}' cannot be read: {error.strerror}") from error
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"access file '{path}' has more than {_MAX_BYTES} bytes, which is the limit")
    try:
        found = json.loads(content, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"access file '{path}' is no JSON: {one_line(str(error))}") from None
    if not isinstance(found, dict) or "principals" not in found:
        raise ConfigError(f"access file '{path}' is no object with 'principals'")
    for name in found.keys() - set(_MEMBERS):
        known = ", ".join(_MEMBERS)
        raise ConfigError(f"access file '{path}': unknown member '{one_line(str(name))}'; known: {known}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the member '{next(name for name in names if names.count(name) > 1)}' stands there twice")
    return found


def new_key(taken: Container[str] = ()) -> tuple[str, str, str]:
    """Return a new key, its id, which is not in ``taken``, and the digest for the file."""
    key_id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    while key_id in taken:
        key_id = secrets.token_hex(4)
    return f"hr_{key_id}_{secret}", key_id, hashlib.sha256(secret.encode()).hexdigest()


def _key(entry: Any, principal: Principal, where: str) -> Key:
    known_members(entry, where, "sha256", "created", "expires", "note")
    digest = entry.get("sha256")
    if not (isinstance(digest, str) and _DIGEST.fullmatch(digest)):
        raise ValueError(f"{where}.sha256 is not 64 hexadecimal digits")
    expires = entry.get("expires")
    try:
        day = None if expires is None else datetime.date.fromisoformat(expires)
    except (TypeError, ValueError):
        raise ValueError(f"{where}.expires is {one_line(repr(expires))}; expected a day such as 2027-01-31") from None
    return Key(bytes.fromhex(digest), principal, day)
