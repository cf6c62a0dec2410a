"""Key sets of issuers (JWKS, RFC 7517), from a file or a URL.

Each key is used only with algorithms of its type that the operator has named. So a public key is never used as the
secret of an HMAC, whatever the header of a token names.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from headrace import ConfigError, Unavailable, one_line, open_regular

if TYPE_CHECKING:
    from jwt import PyJWK

log = logging.getLogger("headrace.access")

#: The key type and the curve of each algorithm.
ASYMMETRIC: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", "")),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
#: The minimum bytes of the secret of each algorithm (RFC 7518 section 3.2).
SYMMETRIC = {"HS256": 32, "HS384": 48, "HS512": 64}
#: The maximum bytes and keys of a set, and the range of bits of an RSA key.
_MAX_BYTES, _MAX_KEYS = 1 << 20, 256
_RSA_BITS = 2048, 8192
#: The minimum interval between fetches, and the timeout of one.
FETCH_INTERVAL_S = 10.0
FETCH_TIMEOUT_S = 5.0
#: The maximum number of callers that wait for a fetch.
_MAX_WAITING = 1000
#: The maximum number of fetches at once, including hanging ones.
_MAX_THREADS = 3


class KeySet:
    """The usable keys of an issuer."""

    def __init__(self, keys: dict[tuple[str | None, str], list[PyJWK]]) -> None:
        self._keys = keys
        #: All keys by algorithm, for tokens without a key id.
        self._by_algorithm: dict[str, list[PyJWK]] = {}
        for (_, algorithm), found in keys.items():
            self._by_algorithm.setdefault(algorithm, []).extend(found)

    def __len__(self) -> int:
        return len({key_id for key_id, _ in self._keys})

    def find(self, key_id: str | None, algorithm: str) -> PyJWK | None:
        """Return the key of a token. Without ``key_id``, return the only key of the algorithm."""
        found = self._by_algorithm.get(algorithm, []) if key_id is None else self._keys.get((key_id, algorithm), [])
        return found[0] if len(found) == 1 else None

    @classmethod
    def parse(cls, content: bytes, algorithms: Sequence[str]) -> KeySet:
        """Return the keys in ``content`` that fit ``algorithms``. Raises `ValueError`."""
        from jwt import PyJWK
        from jwt.exceptions import PyJWTError

        if len(content) > _MAX_BYTES:
            raise ValueError(f"it has more than {_MAX_BYTES} bytes")
        try:
            members = json.loads(content)["keys"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError("it is no JSON object with 'keys'") from None
        if not isinstance(members, list) or len(members) > _MAX_KEYS:
            raise ValueError(f"its 'keys' are no list of at most {_MAX_KEYS}")
        keys: dict[tuple[str | None, str], list[PyJWK]] = {}
        for number, each in enumerate(members):
            if not isinstance(each, dict) or each.get("use", "sig") != "sig":
                continue
            key_id = each.get("kid")
            if key_id is not None and not isinstance(key_id, str):
                raise ValueError(f"keys[{number}].kid is no text")
            for algorithm in algorithms:
                if each.get("alg", algorithm) != algorithm or not _fits(each, algorithm):
                    continue
                if "d" in each:
                    raise ValueError(f"keys[{number}] is a private key; give its public part only")
                try:
                    jwk = PyJWK(each, algorithm)
                except (PyJWTError, ValueError, TypeError) as error:
                    raise ValueError(f"keys[{number}] is no key for {algorithm}: {type(error).__name__}") from None
                _check_size(jwk, algorithm, number)
                keys.setdefault((key_id, algorithm), []).append(jwk)
        if not keys:
            raise ValueError(f"it has no key for {', '.join(algorithms)}")
        return cls(keys)


def read_key_set(path: Path, algorithms: Sequence[str], where: str) -> KeySet:
    """Return the keys in the file. Blocks. Raises `ValueError` that names ``where``."""
    try:
        with open_regular(path) as file:
            return KeySet.parse(file.read(_MAX_BYTES + 1), algorithms)
    except OSError as error:
        raise ValueError(f"{where}: '{path}' cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{where}: '{path}': {error}") from None


def require_library(where: str) -> None:
    """Raise `ConfigError` if PyJWT or its cryptography is missing."""
    try:
        import cryptography  # noqa: F401
        import jwt  # noqa: F401
    except ImportError:
        raise ConfigError(f"{where}: tokens need PyJWT: pip install 'headrace-access[jwt]'") from None


class KeyAddress:
    """The key set at the URL ``address``: fetched at its first use, and refreshed later. Event loop only.

    If a fetch fails, the former set stays in use.
    """

    def __init__(self, address: str, algorithms: Sequence[str], refresh_s: float, changed: Callable[[], None]) -> None:
        self.address = address
        self.current: KeySet | None = None
        self._algorithms, self._refresh_s = algorithms, refresh_s
        #: Called with each new set.
        self.changed = changed
        self._content = b""
        self._begun_s = -1e9
        self._fetching: asyncio.Future[None] | None = None
        self._waiting = 0
        self._threads: list[threading.Thread] = []

    @property
    def may_fetch(self) -> bool:
        """True if a fetch is in progress or may start now."""
        return self._fetching is not None or monotonic() - self._begun_s >= FETCH_INTERVAL_S

    def refresh(self) -> None:
        """Start a fetch if the set is older than ``refresh_s``."""
        if self.current is not None and self._fetching is None and monotonic() - self._begun_s >= self._refresh_s:
            self._fetch()

    async def fetched(self) -> None:
        """Wait for the fetch in progress. Start one if there is none. Raises `Unavailable` if too many callers wait."""
        if self._waiting >= _MAX_WAITING:
            raise Unavailable(f"{_MAX_WAITING} others wait for the keys of the same issuer", retry_after_s=1)
        self._waiting += 1
        try:
            await asyncio.wait([self._fetching or self._fetch()])  # a caller that disconnects does not cancel it
        finally:
            self._waiting -= 1

    def _fetch(self) -> asyncio.Future[None]:
        self._begun_s = monotonic()
        loop = asyncio.get_running_loop()
        self._fetching = fetching = loop.create_future()
        self._threads = [each for each in self._threads if each.is_alive()]
        if len(self._threads) >= _MAX_THREADS:
            self._take(fetching, f"{_MAX_THREADS} fetches do not end")
            return fetching
        thread = threading.Thread(target=self._run, args=(loop, fetching), name="headrace key set", daemon=True)
        self._threads.append(thread)
        thread.start()
        # The timeout of the socket does not end a response that arrives byte by byte.
        loop.call_later(2 * FETCH_TIMEOUT_S, self._take, fetching, f"it takes more than {2 * FETCH_TIMEOUT_S:g} s")
        return fetching

    def _run(self, loop: asyncio.AbstractEventLoop, fetching: asyncio.Future[None]) -> None:
        found: tuple[bytes, KeySet] | str
        try:
            content = read_address(self.address)
            found = content, KeySet.parse(content, self._algorithms)
        except Exception as error:
            found = one_line(str(error) or type(error).__name__)
        with suppress(RuntimeError):  # the server has stopped
            loop.call_soon_threadsafe(self._take, fetching, found)

    def _take(self, fetching: asyncio.Future[None], found: tuple[bytes, KeySet] | str) -> None:
        """End the fetch ``fetching``. Only the first call counts."""
        if fetching.done():
            return
        self._fetching = None
        fetching.set_result(None)
        if isinstance(found, str):
            state = "there are none yet" if self.current is None else "the former ones stay in use"
            log.error("the keys at '%s' cannot be fetched, %s: %s", self.address, state, found)
            return
        content, keys = found
        if content != self._content:
            self._content, self.current = content, keys
            log.info("%d keys from '%s' are in use", len(keys), self.address)
            self.changed()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: Any, **others: Any) -> None:
        """Follow no redirect: it could lead to a URL without TLS."""


def read_address(address: str) -> bytes:
    """Return the content at a URL: at most 1 MiB, within about 5 s. Blocks. Raises `OSError` or `ValueError`."""
    ends_s = monotonic() + FETCH_TIMEOUT_S
    opener = urllib.request.build_opener(_NoRedirects)
    request = urllib.request.Request(address, headers={"Accept": "application/json", "User-Agent": "headrace-access"})
    content = b""
    try:
        with opener.open(request, timeout=FETCH_TIMEOUT_S) as response:
            while piece := response.read1(65536):
                content += piece
                if len(content) > _MAX_BYTES:
                    raise ValueError(f"the answer has more than {_MAX_BYTES} bytes")
                if monotonic() > ends_s:
                    raise TimeoutError(f"the answer takes more than {FETCH_TIMEOUT_S:g} s")
    except urllib.error.HTTPError as error:
        error.close()
        raise ValueError(f"the answer has the status {error.code}") from None
    except http.client.HTTPException as error:
        raise ValueError(f"the answer is no HTTP: {type(error).__name__}") from None
    return content


def _fits(key: dict[str, Any], algorithm: str) -> bool:
    """True if the type and the curve of ``key`` are those of ``algorithm``."""
    if algorithm in SYMMETRIC:
        return key.get("kty") == "oct"
    kind, curve = ASYMMETRIC[algorithm]
    return key.get("kty") == kind and (not curve or key.get("crv") == curve)


def _check_size(key: PyJWK, algorithm: str, number: int) -> None:
    if algorithm in SYMMETRIC:
        if len(key.key) < SYMMETRIC[algorithm]:
            raise ValueError(f"keys[{number}]: the secret has less than {SYMMETRIC[algorithm]} bytes")
    elif ASYMMETRIC[algorithm][0] == "RSA" and not _RSA_BITS[0] <= key.key.key_size <= _RSA_BITS[1]:
        raise ValueError(f"keys[{number}]: an RSA key has {_RSA_BITS[0]} to {_RSA_BITS[1]} bits")
