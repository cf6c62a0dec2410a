"""Trusted issuers of tokens, as in the access file.

::

    "issuers": {
      "https://login.example.com": {
        "keys": "https://login.example.com/jwks.json",
        "audience": "headrace",
        "algorithms": ["RS256"],
        "principal": "sub", "roles": "groups", "prefix": "", "leeway_s": 30, "refresh_s": 300
      }
    }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace import one_line
from headrace_access.access_rules import is_name, known_members, text_list
from headrace_access.key_sets import ASYMMETRIC, SYMMETRIC, KeySet, read_key_set, require_library

_MEMBERS = ("keys", "audience", "algorithms", "principal", "roles", "prefix", "leeway_s", "refresh_s")
#: The maximum leeway in seconds.
_MAX_LEEWAY_S = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """One issuer. ``name`` is the ``iss`` of its tokens."""

    name: str
    #: The URL or the file of its key set.
    keys: str
    audience: tuple[str, ...]
    algorithms: tuple[str, ...]
    #: The claim that names the principal.
    principal: str = "sub"
    #: The claim that names roles; empty for none.
    roles: str = ""
    #: The prefix of the names of its principals, which keeps them apart from others of the file.
    prefix: str = ""
    leeway_s: int = 30
    #: The interval at which the key set at a URL is fetched.
    refresh_s: int = 300
    #: The content of the file; None for a URL.
    key_set: KeySet | None = None

    @property
    def has_address(self) -> bool:
        return self.key_set is None

    def identity(self, claims: Mapping[str, Any]) -> tuple[str, tuple[str, ...]] | str:
        """Return the principal and the roles in the ``claims`` of a token, or the reason why there are none."""
        name = claim_of(claims, self.principal)
        if not isinstance(name, str) or not is_name(self.prefix + name):
            return f"its claim '{self.principal}' names no principal"
        if self.principal == "email" and claims.get("email_verified", True) is not True:
            return "its claim 'email' is not verified"
        found = claim_of(claims, self.roles) if self.roles else None
        if isinstance(found, str):  # such as 'scope', RFC 8693 section 4.2
            found = found.split()
        roles = [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
        return self.prefix + name, tuple(roles)


def claim_of(claims: Mapping[str, Any], name: str) -> Any:
    """Return the claim ``name``, or else the claim at the path ``name``, such as realm_access.roles."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for step in name.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def read_issuer(name: str, members: Any, folder: Path) -> Issuer:
    """Return the issuer ``name`` of an access file in ``folder``. Reads its key set if that is a file.

    Raises `ValueError` with the place in the file, and `ConfigError` if PyJWT is missing.
    """
    where = f"issuers.{one_line(name)}"
    known_members(members, where, *_MEMBERS)
    audience = members.get("audience")
    audience = [audience] if isinstance(audience, str) and audience else audience
    algorithms = text_list(members.get("algorithms"), f"{where}.algorithms", "['RS256']")
    unknown = [each for each in algorithms if each not in ASYMMETRIC and each not in SYMMETRIC]
    if unknown:
        raise ValueError(
            f"{where}.algorithms: '{one_line(unknown[0])}' is none of {', '.join((*ASYMMETRIC, *SYMMETRIC))}"
        )
    is_symmetric = algorithms[0] in SYMMETRIC
    if any((each in SYMMETRIC) != is_symmetric for each in algorithms):
        raise ValueError(
            f"{where}.algorithms: name algorithms with a shared secret (HS...) or with a public key, not both"
        )
    keys = members.get("keys")
    if not isinstance(keys, str) or not keys:
        raise ValueError(f"{where}.keys is no address or file of a key set (JWKS)")
    require_library(where)
    key_set = None
    if "://" not in keys:
        keys = str(folder / keys)
        key_set = read_key_set(Path(keys), algorithms, f"{where}.keys")
    else:
        _check_address(keys, f"{where}.keys")
        if is_symmetric:
            raise ValueError(
                f"{where}.keys: the shared secret of '{algorithms[0]}' comes from a file, not from an address"
            )
    return Issuer(
        name=name,
        keys=keys,
        audience=text_list(audience, f"{where}.audience", "['headrace']"),
        algorithms=algorithms,
        principal=_text(members, where, "principal", "sub") or "sub",
        roles=_text(members, where, "roles", ""),
        prefix=_text(members, where, "prefix", ""),
        leeway_s=_seconds(members, where, "leeway_s", 30, 0, _MAX_LEEWAY_S),
        refresh_s=_seconds(members, where, "refresh_s", 300, 10, 86400),
        key_set=key_set,
    )


def _check_address(address: str, where: str) -> None:
    """Raise `ValueError` unless ``address`` is a URL with https, or of this machine."""
    parts = urlsplit(address)
    if parts.scheme not in ("https", "http") or not parts.hostname:
        raise ValueError(f"{where}: '{one_line(address)}' is no https address")
    if parts.username is not None:
        raise ValueError(f"{where}: an address with a password is not supported")
    if parts.scheme == "http" and parts.hostname != "localhost" and not _is_loopback(parts.hostname):
        raise ValueError(
            f"{where}: '{one_line(address)}' has no TLS, so anyone between could replace the keys; use https"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _text(members: Mapping[str, Any], where: str, name: str, default: str) -> str:
    found = members.get(name, default)
    if not isinstance(found, str) or not found.isprintable():
        raise ValueError(f"{where}.{name} is no text")
    return found


def _seconds(members: Mapping[str, Any], where: str, name: str, default: int, minimum: int, maximum: int) -> int:
    found = members.get(name, default)
    if type(found) is not int or not minimum <= found <= maximum:
        raise ValueError(f"{where}.{name} is {one_line(repr(found))}; expected {minimum} to {maximum} seconds")
    return found
