"""Tokens of issuers (JWT, RFC 7519): verified once, then cached until they expire."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode
from collections.abc import Awaitable, Callable
from hashlib import sha256
from time import time
from typing import Any, NamedTuple, TypeAlias

from headrace import HeadraceError, Unavailable, one_line
from headrace_access.access_rules import MAX_CHARACTERS, Verified
from headrace_access.issuers import Issuer
from headrace_access.key_file import KeyFile
from headrace_access.key_sets import FETCH_INTERVAL_S, KeyAddress, KeySet
from headrace_access.verification_limiter import VerificationLimiter

_LONGEST_KEY_ID = 256
#: The maximum number of cached tokens and of cached wrong ones. 16,384 tokens take about 10 MB.
_MAX_KNOWN, _MAX_WRONG = 16_384, 4096
NO_TOKEN = "it is no token"


#: A token, the reason why it is refused, or an awaitable of one of both.
Found: TypeAlias = "Verified | str | Awaitable[Verified | str]"


class Tokens:
    """The tokens of the issuers in ``file``. Event loop only."""

    def __init__(self, file: KeyFile, former: Tokens | None = None) -> None:
        """Create it. If an issuer has not changed, its keys from ``former`` are used."""
        self._file = file
        self._limiter: VerificationLimiter = VerificationLimiter() if former is None else former._limiter
        self._addresses: dict[str, KeyAddress] = {}
        for name, issuer in file.issuers.items():
            if not issuer.has_address:
                continue
            address = None if former is None or former._file.issuers.get(name) != issuer else former._addresses[name]
            if address is not None:
                address.changed = self.forget
            self._addresses[name] = address or KeyAddress(issuer.keys, issuer.algorithms, issuer.refresh_s, self.forget)
        self._known: dict[bytes, Verified] = {}
        self._wrong: set[bytes] = set()
        #: Called when valid tokens may no longer be valid.
        self.on_forget: Callable[[], None] = lambda: None

    def forget(self) -> None:
        """Clear the cache, because the keys of an issuer have changed."""
        self._known.clear()
        self._wrong.clear()
        self.on_forget()

    def refresh(self) -> None:
        """Start to fetch old key sets."""
        for address in self._addresses.values():
            address.refresh()

    def find(self, text: str) -> Found:
        """Return the principal of the token ``text``, the reason why it is refused, or an awaitable of one of both.

        The awaitable waits for the keys of the issuer, or for the limiter, which permits one unknown token in each turn
        of the event loop. Raises `Unavailable` if there are no keys, or if too many unknown tokens arrive.
        """
        digest = sha256(text.encode("utf-8", "surrogatepass")).digest()
        known = self._known.get(digest)
        if known is not None:
            return known if time() < known.until_s else "it has expired"
        if digest in self._wrong:
            return "its signature is wrong"
        if self._limiter.is_taken:
            return self._find_in_turn(text, digest)
        return self._find_unknown(text, digest)

    async def _find_in_turn(self, text: str, digest: bytes) -> Verified | str:
        await self._limiter.turn()
        if digest in self._wrong:  # another caller has sent it meanwhile
            return "its signature is wrong"
        found = self._known.get(digest) or self._find_unknown(text, digest)
        return await found if isinstance(found, Awaitable) else found

    def _find_unknown(self, text: str, digest: bytes) -> Found:
        begun_ns = self._limiter.begin()
        try:
            token = decode_unverified(text)
            if isinstance(token, str):
                return token
            issuer = self._issuer(token)
            if isinstance(issuer, str):
                return issuer
            keys, address = issuer.key_set, self._addresses.get(issuer.name)
            if address is not None:
                keys = address.current
            if (keys is None or not self._has_key(keys, token)) and address is not None and address.may_fetch:
                return self._find_later(text, digest, token, issuer, address)
            return self._verify(text, digest, token, issuer, keys)
        finally:
            self._limiter.end(begun_ns)

    async def _find_later(
        self, text: str, digest: bytes, token: UnverifiedToken, issuer: Issuer, address: KeyAddress
    ) -> Any:
        await address.fetched()
        await self._limiter.turn()
        begun_ns = self._limiter.begin()
        try:
            return self._verify(text, digest, token, issuer, address.current)
        finally:
            self._limiter.end(begun_ns)

    def _issuer(self, token: UnverifiedToken) -> Issuer | str:
        """Return the issuer that ``token`` names, or the reason why it is refused. Does not verify its signature."""
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
    def _has_key(keys: KeySet, token: UnverifiedToken) -> bool:
        return keys.find(token.header.get("kid"), token.header["alg"]) is not None

    def _verify(
        self, text: str, digest: bytes, token: UnverifiedToken, issuer: Issuer, keys: KeySet | None
    ) -> Verified | str:
        """Verify signature and claims, and cache the result."""
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
                text,
                key,
                algorithms=list(issuer.algorithms),
                audience=issuer.audience,
                issuer=issuer.name,
                leeway=issuer.leeway_s,
                options={"require": ["exp"]},
            )
            until_s = float(claims["exp"]) + issuer.leeway_s
        except exceptions.InvalidSignatureError:
            if len(self._wrong) >= _MAX_WRONG:
                self._wrong.clear()
            self._wrong.add(digest)
            return "its signature is wrong"
        except Exception as error:  # PyJWT compares values of the token of any type: infinite numbers, texts, lists
            return _reason(error)
        identity = issuer.identity(claims)
        if isinstance(identity, str):
            return identity
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        found = self._known[digest] = Verified(self._file.named(*identity), until_s)
        return found


class UnverifiedToken(NamedTuple):
    """The header and the claims of a token with an unverified signature."""

    header: dict[str, Any]
    claims: dict[str, Any]


def decode_unverified(text: str) -> UnverifiedToken | str:
    """Return header and claims of the token ``text``, unverified, or the reason why it is malformed."""
    if len(text) > MAX_CHARACTERS:
        return "it is too long"
    parts = text.split(".")
    if len(parts) != 3:
        return NO_TOKEN
    try:
        header, claims = (json.loads(urlsafe_b64decode(part + "=" * (-len(part) % 4))) for part in parts[:2])
    except (ValueError, RecursionError):
        return NO_TOKEN
    return UnverifiedToken(header, claims) if isinstance(header, dict) and isinstance(claims, dict) else NO_TOKEN


def _reason(error: Exception) -> str:
    """Return the reason why PyJWT refuses a token."""
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
