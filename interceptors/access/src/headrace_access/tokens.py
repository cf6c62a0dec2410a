"""Tokens of issuers (JWT, RFC 7519): verified once, then looked up until they expire."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from collections.abc import Awaitable, Callable
from hashlib import sha256
from time import time
from typing import Any, NamedTuple, TypeAlias

from headrace import HeadraceError, Unavailable, one_line
from headrace_access.access_rules import MOST_CHARACTERS, Verified
from headrace_access.issuers import Issuer
from headrace_access.key_file import KeyFile
from headrace_access.key_sets import FETCH_INTERVAL_S, KeyAddress, KeySet
from headrace_access.verification_pace import VerificationPace

_LONGEST_KEY_ID = 256
#: Tokens that are kept, and wrong ones: 16,384 take about 10 MB.
_KEPT, _KEPT_WRONG = 16_384, 4096
NO_TOKEN = "it is no token"


#: A token, why it is refused, or what to await for one of both.
Found: TypeAlias = "Verified | str | Awaitable[Verified | str]"


class Tokens:
    """The tokens of the issuers in ``file``. Event loop only."""

    def __init__(self, file: KeyFile, former: Tokens | None = None) -> None:
        """Create it. Addresses whose issuer has not changed keep the keys that ``former`` has fetched."""
        self._file = file
        self._pace: VerificationPace = VerificationPace() if former is None else former._pace
        self._addresses: dict[str, KeyAddress] = {}
        for name, issuer in file.issuers.items():
            if not issuer.has_address:
                continue
            kept = None if former is None or former._file.issuers.get(name) != issuer else former._addresses[name]
            if kept is not None:
                kept.changed = self.forget
            self._addresses[name] = kept or KeyAddress(issuer.keys, issuer.algorithms, issuer.refresh_s, self.forget)
        self._known: dict[bytes, Verified] = {}
        self._wrong: set[bytes] = set()
        #: Called when tokens that were right may be wrong now.
        self.on_forget: Callable[[], None] = lambda: None

    def forget(self) -> None:
        """Verify all tokens again: the keys of an issuer have changed."""
        self._known.clear()
        self._wrong.clear()
        self.on_forget()

    def keep_fresh(self) -> None:
        """Begin to fetch key sets that are old."""
        for address in self._addresses.values():
            address.keep_fresh()

    def find(self, given: str) -> Found:
        """Return the principal of the token ``given``, why it is refused, or an awaitable of one of both.

        The awaitable waits for the keys of the issuer, or for the turn of an unknown token: one is verified in each
        turn of the event loop. Raises `Unavailable` if there are no keys, or if too many unknown tokens arrive.
        """
        digest = sha256(given.encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(digest)
        if known is not None:
            return known if time() < known.until_s else "it has expired"
        if digest in self._wrong:
            return "its signature is wrong"
        if self._pace.is_taken:
            return self._find_in_turn(given, digest)
        return self._find_unknown(given, digest)

    async def _find_in_turn(self, given: str, digest: bytes) -> Verified | str:
        await self._pace.turn()
        if digest in self._wrong:  # another caller has shown it meanwhile
            return "its signature is wrong"
        found = self._known.get(digest) or self._find_unknown(given, digest)
        return await found if isinstance(found, Awaitable) else found

    def _find_unknown(self, given: str, digest: bytes) -> Found:
        begun_ns = self._pace.begin()
        try:
            token = peek(given)
            if isinstance(token, str):
                return token
            issuer = self._issuer(token)
            if isinstance(issuer, str):
                return issuer
            keys, address = issuer.key_set, self._addresses.get(issuer.name)
            if address is not None:
                keys = address.current
            if (keys is None or not self._has_key(keys, token)) and address is not None and address.may_fetch:
                return self._find_later(given, digest, token, issuer, address)
            return self._verify(given, digest, token, issuer, keys)
        finally:
            self._pace.end(begun_ns)

    async def _find_later(self, given: str, digest: bytes, token: Peeked, issuer: Issuer, address: KeyAddress) -> Any:
        await address.fetched()
        await self._pace.turn()
        begun_ns = self._pace.begin()
        try:
            return self._verify(given, digest, token, issuer, address.current)
        finally:
            self._pace.end(begun_ns)

    def _issuer(self, token: Peeked) -> Issuer | str:
        """Return the issuer that ``token`` names, or why it is refused, before its signature is verified."""
        header, claims = token
        name = claims.get("iss")
        issuer = self._file.issuers.get(name) if isinstance(name, str) else None
        if issuer is None:
            return "its issuer is not known"
        if header.get("alg") not in issuer.algorithms:
            return "its algorithm is not allowed"
        if "crit" in header or "b64" in header:
            return "its header has critical fields"
        key_id = header.get("kid")
        if key_id is not None and not (isinstance(key_id, str) and len(key_id) <= _LONGEST_KEY_ID):
            return "its header names no key"
        expires = claims.get("exp")
        if isinstance(expires, (int, float)) and expires + issuer.leeway_s <= time():
            return "it has expired"
        return issuer

    @staticmethod
    def _has_key(keys: KeySet, token: Peeked) -> bool:
        return keys.find(token.header.get("kid"), token.header["alg"]) is not None

    def _verify(self, given: str, digest: bytes, token: Peeked, issuer: Issuer, keys: KeySet | None) -> Verified | str:
        """Verify signature and claims, and keep the result."""
        if keys is None:
            raise Unavailable(
                f"the keys of the issuer '{one_line(issuer.name)}' cannot be fetched", retry_after_s=FETCH_INTERVAL_S
            )
        key = keys.find(token.header.get("kid"), token.header["alg"])
        if key is None:
            return "its key is not known"
        import jwt
        from jwt import exceptions

        try:
            claims = jwt.decode(
                given,
                key,
                algorithms=list(issuer.algorithms),
                audience=issuer.audience,
                issuer=issuer.name,
                leeway=issuer.leeway_s,
                options={"require": ["exp"]},
            )
            until_s = float(claims["exp"]) + issuer.leeway_s
        except exceptions.InvalidSignatureError:
            if len(self._wrong) >= _KEPT_WRONG:
                self._wrong.clear()
            self._wrong.add(digest)
            return "its signature is wrong"
        except Exception as error:  # PyJWT compares what a token has: numbers without end, texts, lists
            return _reason(error)
        identity = issuer.identity(claims)
        if isinstance(identity, str):
            return identity
        if len(self._known) >= _KEPT:
            self._known.clear()
        found = self._known[digest] = Verified(self._file.named(*identity), until_s)
        return found


class Peeked(NamedTuple):
    """The header and the claims of a token whose signature is not verified yet."""

    header: dict[str, Any]
    claims: dict[str, Any]


def peek(given: str) -> Peeked | str:
    """Return header and claims of the token ``given``, unverified; or why it is none."""
    if len(given) > MOST_CHARACTERS:
        return "it is too long"
    parts = given.split(".")
    if len(parts) != 3:
        return NO_TOKEN
    try:
        header, claims = (json.loads(urlsafe_b64decode(part + "=" * (-len(part) % 4))) for part in parts[:2])
    except (ValueError, RecursionError):
        return NO_TOKEN
    return Peeked(header, claims) if isinstance(header, dict) and isinstance(claims, dict) else NO_TOKEN


def _reason(error: Exception) -> str:
    """Return why PyJWT refuses a token."""
    from jwt import exceptions

    if isinstance(error, HeadraceError):
        raise error
    if isinstance(error, exceptions.MissingRequiredClaimError):
        return f"it has no claim '{error.claim}'"
    for kind, reason in (
        (exceptions.ExpiredSignatureError, "it has expired"),
        (exceptions.ImmatureSignatureError, "it is not valid yet"),
        (exceptions.InvalidAudienceError, "it is for another audience"),
        (exceptions.InvalidAlgorithmError, "its algorithm is not allowed"),
    ):
        if isinstance(error, kind):
            return reason
    return "it is malformed"
