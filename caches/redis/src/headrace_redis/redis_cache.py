"""Answers in Redis: one string per answer, under the digest of its question."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headrace import CachedResponse, ConfigError, InvalidArgument, ResponseCache, pack_response, unpack_response

if TYPE_CHECKING:
    import redis

#: The prefix of every key. It changes with the packed format.
PREFIX = b"headrace:1:"
#: The default timeouts of a connection and of an answer. Requests do not wait this long.
_DEFAULT_TIMEOUT_MS = 5000
_MAX_THREADS = 64


def _from_environment(name: str, default: str = "") -> Any:
    return field(default_factory=lambda: os.environ.get(f"TRITONCACHE_REDIS_{name}", default))


@dataclass(frozen=True, slots=True)
class RedisParameters:
    """The settings of ``--cache-config=redis,FIELD=VALUE``. Times are in milliseconds; 0 means 5 s."""

    host: str = ""
    port: int = 0
    user: str = _from_environment("USERNAME", "default")
    password: str = field(default_factory=lambda: os.environ.get("TRITONCACHE_REDIS_PASSWORD", ""), repr=False)
    db: int = 0
    connect_timeout: int = 0
    socket_timeout: int = 0
    pool_size: int = 1  #: connections, and threads that ask
    wait_timeout: int = 1000  #: for a connection of the pool
    tls_enabled: bool = False
    cert: str = ""
    key: str = ""
    cacert: str = ""
    cacert_dir: str = ""
    sni: str = ""
    max_entry_bytes: int = 64 << 20  #: of a packed response; larger ones are neither stored nor accepted
    expire_seconds: int = 0  #: after which Redis removes an answer; 0 for never

    def __post_init__(self) -> None:
        if not self.host or not self.port:
            raise ValueError("Failed to initialize RedisCache, didn't specify a host and port.")
        if self.sni:
            raise ValueError(
                f"'sni' is '{self.sni}', but redis-py asks for the name in 'host': let the certificate have it"
            )
        tls_files = [name for name in ("cert", "key", "cacert", "cacert_dir") if getattr(self, name)]
        if tls_files and not self.tls_enabled:
            raise ValueError(f"'{tls_files[0]}' is given, but 'tls_enabled' is false: nothing would be encrypted")
        if bool(self.cert) != bool(self.key):
            raise ValueError("'cert' and 'key' belong together, and one of them is missing")
        for name, least, most in (
            ("port", 1, 65535),
            ("db", 0, 1 << 31),
            ("connect_timeout", 0, 1 << 31),
            ("socket_timeout", 0, 1 << 31),
            ("pool_size", 1, _MAX_THREADS),
            ("wait_timeout", 0, 1 << 31),
            ("max_entry_bytes", 1, 512 << 20),
            ("expire_seconds", 0, 1 << 31),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"'{name}' is {getattr(self, name)}, expected {least} to {most}")


class RedisCache(ResponseCache):
    """Answers in a Redis server. Any thread, as many at once as there are ``pool_size``."""

    name: ClassVar[str] = "redis"
    Parameters = RedisParameters
    is_remote = True

    def __init__(self, parameters: RedisParameters) -> None:
        super().__init__(parameters)
        self.threads, self.largest_bytes = parameters.pool_size, parameters.max_entry_bytes
        self._most, self._expire_s = parameters.max_entry_bytes, parameters.expire_seconds or None
        self._client = _connect(parameters)

    def get(self, key: bytes) -> CachedResponse | None:
        """Return the stored response. Any client may write to Redis, so at most the allowed size is fetched."""
        found = self._client.getrange(PREFIX + key.hex().encode(), 0, self._most)
        if not found:
            return None
        if len(found) > self._most:
            raise InvalidArgument(f"an answer in Redis takes more than 'max_entry_bytes', {self._most}")
        return unpack_response(found)

    def put(self, key: bytes, response: CachedResponse) -> None:
        """Store the response. Do nothing if another server was faster, or if it is too large."""
        packed = pack_response(response)
        if len(packed) <= self._most:
            self._client.set(PREFIX + key.hex().encode(), packed, ex=self._expire_s, nx=True)

    def close(self) -> None:
        self._client.close()


def _try_files(parameters: RedisParameters) -> None:
    """Read the files for TLS once: a later connection would only fail with an error number, while a request waits."""
    context, cert, key = ssl.create_default_context(), parameters.cert, parameters.key
    shown = f"'cacert' ({parameters.cacert})"
    try:
        if parameters.cacert:
            context.load_verify_locations(parameters.cacert)
        shown = f"'cert' ({cert}) and 'key' ({key})"
        if cert:
            context.load_cert_chain(cert, key)
    except OSError as error:  # those of `ssl` are, too
        raise ConfigError(f"cannot use {shown}: {error}") from error
    if parameters.cacert_dir and not Path(parameters.cacert_dir).is_dir():
        raise ConfigError(f"cannot use 'cacert_dir' ({parameters.cacert_dir}): it is no directory")


def _connect(parameters: RedisParameters) -> redis.Redis:
    """A client that connects at its first command, and does not retry: the model answers instead."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    tls: dict[str, Any] = {}
    if parameters.tls_enabled:
        _try_files(parameters)
        tls = {
            "connection_class": redis.SSLConnection,
            "ssl_certfile": parameters.cert or None,
            "ssl_keyfile": parameters.key or None,
            "ssl_ca_certs": parameters.cacert or None,
            "ssl_ca_path": parameters.cacert_dir or None,
            "ssl_check_hostname": True,
        }
    pool = redis.BlockingConnectionPool(
        max_connections=parameters.pool_size,
        timeout=parameters.wait_timeout / 1000,
        host=parameters.host,
        port=parameters.port,
        db=parameters.db,
        username=(parameters.user or None) if parameters.password else None,
        password=parameters.password or None,
        socket_connect_timeout=(parameters.connect_timeout or _DEFAULT_TIMEOUT_MS) / 1000,
        socket_timeout=(parameters.socket_timeout or _DEFAULT_TIMEOUT_MS) / 1000,
        retry=Retry(NoBackoff(), 0),
        **tls,
    )
    return redis.Redis.from_pool(pool)
