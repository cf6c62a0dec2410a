"""The response cache of a server, and its use by one version of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from headrace.caches.base import CachedResponse, ResponseCache
from headrace.caches.kept_responses import content_bytes, lent, own
from headrace.caches.keys import CacheKeys
from headrace.caches.packing import check_parameters
from headrace.caches.remote_calls import LookUpDone, RemoteCalls
from headrace.config.model_config_pb2 import ModelParameter
from headrace.config.parameters import parse_parameters, unknown
from headrace.errors import ConfigError, HeadraceError, InvalidArgument, PluginError, Unavailable, summary
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.spec import Spec
from headrace.messages.tensor import data_type
from headrace.off_loop import OffLoopWork
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)

#: Requests and responses of this many bytes or more are hashed and copied on a thread: 0.3 ms of work.
LARGE_BYTES = 256 * 1024


class CacheClasses(Protocol):
    """A registry of cache classes. ``get`` raises `LoadError` with the reason if it has no class of that name."""

    def get(self, name: str) -> type[ResponseCache]: ...


def make_cache(configured: Mapping[str, Mapping[str, str]], classes: CacheClasses) -> ResponseCache:
    """Make the cache that ``--cache-config`` names. May block. Raises `ConfigError`, `LoadError` and `PluginError`."""
    if len(configured) > 1:
        raise ConfigError("found multiple cache configurations, but only a single cache is currently supported")
    ((name, settings),) = configured.items()
    kind = classes.get(name)
    parameters = {key: ModelParameter(string_value=value) for key, value in settings.items()}
    try:
        for problem in unknown(kind.Parameters, parameters):
            raise ConfigError(problem.message)
        return kind(parse_parameters(kind.Parameters, parameters))
    except HeadraceError as error:
        text = error.message.removeprefix("parameters: ")
        raise ConfigError(f"--cache-config={name},...: {text}", error.code) from error
    except BaseException as error:  # raised by the plugin's code
        raise PluginError(f"response cache '{name}' failed to start: {summary(error)}") from error


class ServerCache:
    """The cache of a server, with the threads for work that is too long for its event loop. Event loop only."""

    def __init__(self, cache: ResponseCache, off_loop_work: OffLoopWork, loop: asyncio.AbstractEventLoop) -> None:
        self.cache, self.off_loop_work = cache, off_loop_work
        self.remote = RemoteCalls(cache, loop) if cache.is_remote else None

    def close(self) -> None:
        """Close the cache. Blocks."""
        (self.remote or self.cache).close()


class CachedSignature(Protocol):
    """The attributes of a `headrace.models.signature.Signature` that the cache needs."""

    batched: bool
    outputs: dict[str, Spec]


class ModelCache:
    """The cached responses of one version of a model in ``server``. ``identity`` is unique to the version."""

    def __init__(
        self,
        server: ServerCache,
        name: str,
        version: str,
        identity: bytes,
        signature: CachedSignature,
    ) -> None:
        self.name, self.version = name, version
        self.keys = CacheKeys(identity, signature.outputs)
        self._server, self._cache = server, server.cache
        self._outputs, self._batched = signature.outputs, signature.batched
        self.is_remote = server.remote is not None
        #: Called with each failure of the cache, to count it.
        self.failed: Callable[[Exception], None] = _ignore

    def find(self, key: bytes) -> CachedResponse | None:
        """Return the response under ``key`` in a cache that is not remote, or None."""
        try:
            return self._cache.get(key)
        except Exception as error:
            self._note(error)
            return None

    def ask(self, key: bytes, done: LookUpDone) -> bool:
        """Look up ``key`` in a remote cache; ``done`` gets the result. Return False if the cache is not called now."""
        remote = self._server.remote
        assert remote is not None
        return remote.get(key, self._check, partial(self._looked_up, done))

    def digest_on_thread(self, request: InferRequest, done: Callable[[bytes | Exception], None]) -> bool:
        """Compute the key of a large ``request`` on a thread; ``done`` is called with it. Return False if too much work
        is queued."""
        try:
            self._server.off_loop_work.begin(partial(self.keys.key, request), done)
        except Unavailable:
            return False
        return True

    def keep(self, key: bytes, response: InferResponse) -> CachedResponse:
        """Store ``response``. Return the `CachedResponse`, for requests that wait for the same key."""
        size = content_bytes(response.outputs.values())
        if size > min(LARGE_BYTES, self._cache.largest_bytes):
            if size <= self._cache.largest_bytes:
                self._copy_on_thread(key, response)
            else:
                self._log_too_large(key, size)
            return lent(response)
        entry = own(response)
        self._put(key, entry)
        return entry

    def _copy_on_thread(self, key: bytes, response: InferResponse) -> None:
        try:
            self._server.off_loop_work.begin(partial(own, response), partial(self._copied, key))
        except Unavailable as error:
            self.failed(error)

    def _copied(self, key: bytes, entry: CachedResponse | Exception) -> None:
        if isinstance(entry, Exception):
            self._note(entry)
        else:
            self._put(key, entry)

    def _log_too_large(self, key: bytes, size: int) -> None:
        """Log Triton's message, in which a key is a number."""
        log.error(
            "Failed to insert key [%d] into response cache: Requested byte_size: %d is greater than total cache size: "
            "%d",
            int.from_bytes(key[:8], "little"),
            size,
            self._cache.largest_bytes,
            extra={"model": self.name},
        )

    def _put(self, key: bytes, entry: CachedResponse) -> None:
        if entry.size_bytes > self._cache.largest_bytes:
            self._log_too_large(key, entry.size_bytes)
            return
        remote = self._server.remote
        try:
            if remote is None:
                self._cache.put(key, entry)
            else:
                remote.put(key, entry, self.failed)
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        log.warning("response cache '%s' failed for model '%s': %s", self._cache.name, self.name, summary(error))
        self.failed(error)

    def _looked_up(self, done: LookUpDone, outcome: CachedResponse | Exception | None) -> None:
        if isinstance(outcome, Exception):
            self.failed(outcome)
        done(outcome)

    def _check(self, response: CachedResponse) -> None:
        """Raise `InvalidArgument` unless the model could have sent ``response``. Any thread."""
        try:
            check_parameters(response.parameters)
        except ValueError as error:
            raise InvalidArgument(f"the cache has a response that model '{self.name}' cannot send: {error}") from None
        for name, tensor in response.outputs.items():
            spec = self._outputs.get(name)
            if spec is None:
                raise InvalidArgument(f"the cache has an output '{name}', which model '{self.name}' does not have")
            dims = tensor.shape[self._batched :]
            fits = len(dims) == len(spec.dims) and all(
                want in (-1, got) for want, got in zip(spec.dims, dims, strict=True)
            )
            if data_type(tensor) is not spec.datatype or not fits or len(tensor.shape) != len(dims) + self._batched:
                raise InvalidArgument(
                    f"the cache has output '{name}' of model '{self.name}' as {data_type(tensor)} {list(tensor.shape)}"
                )


def _ignore(error: Exception) -> None:
    """Count nothing."""
