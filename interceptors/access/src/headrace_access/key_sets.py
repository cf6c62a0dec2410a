"""Key sets of issuers (JWKS, RFC 7517): read from a file, or fetched from an address and kept.

Each key is bound to the algorithms that its type has and the operator has named. So a public key is never the secret of
an HMAC, whatever a token says.
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

#: By algorithm, the type of its keys, and the curve of those that have one.
ASYMMETRIC: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), ("RSA", "")),
    "ES256": ("EC", "P-256"),
    "ES384": ("EC", "P-384"),
    "ES512": ("EC", "P-521"),
    "EdDSA": ("OKP", "Ed25519"),
}
#: By algorithm, the least bytes of its secret (RFC 7518 section 3.2).
SYMMETRIC = {"HS256": 32, "HS384": 48, "HS512": 64}
#: The most bytes and keys of a set, and the bits of an RSA key.
_MOST_BYTES, _MOST_KEYS = 1 << 20, 256
_RSA_BITS = 2048, 8192
#: A key set is fetched at most this often, and a fetch takes at most so long.
FETCH_INTERVAL_S = 10.0
FETCH_TIMEOUT_S = 5.0
#: The most callers that wait for a fetch.
_MOST_WAITING = 1000
#: The most fetches that do not end, beside which no other one begins.
_MOST_THREADS = 3


class KeySet:
    """The usable keys of an issuer."""

    def __init__(self, keys: dict[tuple[str | None, str], list[PyJWK]]) -> None:
        self._keys = keys
        #: By algorithm, all keys: for tokens that name none.
        self._by_algorithm: dict[str, list[PyJWK]] = {}
        for (_, algorithm), found in keys.items():
            self._by_algorithm.setdefault(algorithm, []).extend(found)

    def __len__(self) -> int:
        return len({key_id for key_id, _ in self._keys})

    def find(self, key_id: str | None, algorithm: str) -> PyJWK | None:
        """Return the key of a token. Without ``key_id``, it is the only one of the algorithm."""
        found = self._by_algorithm.get(algorithm, []) if key_id is None else self._keys.get((key_id, algorithm), [])
        return found[0] if len(found) == 1 else None

    @classmethod
    def parse(cls, content: bytes, algorithms: Sequence[str]) -> KeySet:
        """Return the keys in ``content`` that fit ``algorithms``. Others are left out. Raises `ValueError`."""
        from jwt import PyJWK
        from jwt.exceptions import PyJWTError

        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES} bytes")
        try:
            given = json.loads(content)["keys"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError("it is no JSON object with 'keys'") from None
        if not isinstance(given, list) or len(given) > _MOST_KEYS:
            raise ValueError(f"its 'keys' are no list of at most {_MOST_KEYS}")
        keys: dict[tuple[str | None, str], list[PyJWK]] = {}
        for number, each in enumerate(given):
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
                    made = PyJWK(each, algorithm)
                except (PyJWTError, ValueError, TypeError) as error:
                    raise ValueError(f"keys[{number}] is no key for {algorithm}: {type(error).__name__}") from None
                _check_size(made, algorithm, number)
                keys.setdefault((key_id, algorithm), []).append(made)
        if not keys:
            raise ValueError(f"it has no key for {', '.join(algorithms)}")
        return cls(keys)


def read_key_set(path: Path, algorithms: Sequence[str], where: str) -> KeySet:
    """Return the keys in the file. Blocks. Raises `ValueError` that names ``where``."""
    try:
        with open_regular(path) as file:
            return KeySet.parse(file.read(_MOST_BYTES + 1), algorithms)
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
    """The key set at ``address``, fetched when it is first needed, and again later. Event loop only.

    A fetch that fails leaves the former set.
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
        """True if a fetch is in progress, or may begin now."""
        return self._fetching is not None or monotonic() - self._begun_s >= FETCH_INTERVAL_S

    def keep_fresh(self) -> None:
        """Begin to fetch a set that is old."""
        if self.current is not None and self._fetching is None and monotonic() - self._begun_s >= self._refresh_s:
            self._fetch()

    async def fetched(self) -> None:
        """Wait for the fetch in progress, which this call may begin. Raises `Unavailable` if too many wait."""
        if self._waiting >= _MOST_WAITING:
            raise Unavailable(f"{_MOST_WAITING} others wait for the keys of the same issuer", retry_after_s=1)
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
        if len(self._threads) >= _MOST_THREADS:
            self._take(fetching, f"{_MOST_THREADS} fetches do not end")
            return fetching
        thread = threading.Thread(target=self._run, args=(loop, fetching), name="headrace key set", daemon=True)
        self._threads.append(thread)
        thread.start()
        # A head that comes byte by byte passes the time-out of the socket.
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
        """An address that redirects is refused: it could lead to one without TLS."""


def read_address(address: str) -> bytes:
    """Return what an address answers: at most 1 MiB, within about 5 s. Blocks. Raises `OSError` or `ValueError`."""
    ends_s = monotonic() + FETCH_TIMEOUT_S
    opener = urllib.request.build_opener(_NoRedirects)
    asked = urllib.request.Request(address, headers={"Accept": "application/json", "User-Agent": "headrace-access"})
    content = b""
    try:
        with opener.open(asked, timeout=FETCH_TIMEOUT_S) as response:
            while piece := response.read1(65536):
                content += piece
                if len(content) > _MOST_BYTES:
                    raise ValueError(f"the answer has more than {_MOST_BYTES} bytes")
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
