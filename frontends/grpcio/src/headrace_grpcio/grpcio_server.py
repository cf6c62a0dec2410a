"""gRPC by grpcio's asyncio server. The only module that imports grpcio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import unquote

import grpc
from grpc.aio import Server, ServicerContext

from headrace import ConfigError, ServerOptions, Unavailable

if TYPE_CHECKING:
    from headrace import GrpcHost, Rpc, TlsFiles

log = logging.getLogger(__name__)

#: In grpc's numbers. Its core picks an algorithm that the client accepts: gzip for low, else deflate.
#: It has no levels per RPC, so that they apply to all, where Triton compresses inference only.
_COMPRESSION_LEVELS: dict[str, int] = {"none": 0, "low": 1, "medium": 2, "high": 3}
#: The names of a client's certificate that grpc's core passes on beside its common name.
_NAMES = {"URI": "peer_uri", "DNS": "peer_dns"}
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}

#: Calls that grpc's core may hold for us, of all connections together. Beyond its own 1,000 it refuses any of them as
#: cancelled, and those that clients have cancelled count until we look.
_PENDING_CALLS = 65_536
#: From the connect to the end of a TLS handshake and the beginning of HTTP/2, as in the native host.
_HANDSHAKE_MS = 20_000
#: What one gRPC message may hold, in either direction.
_MESSAGE_BYTES = 2**31 - 1

#: Between two looks at what holds up the end, and for clients to read what is said to them last.
_LOOK_SECONDS, _LAST_WORDS_SECONDS = 0.1, 0.2
#: For clients to read the answers of unary calls.
_UNREAD_SECONDS = 2.0


@lru_cache(maxsize=1024)
def _certificate(common_names: tuple[bytes, ...], others: tuple[tuple[str, bytes], ...]) -> Mapping[str, Any]:
    """Return a certificate with these names: the same object each time, so that what was decided for it can be kept."""
    return {
        "subject": tuple((("commonName", name.decode()),) for name in common_names),
        "subjectAltName": tuple((kind, name.decode()) for kind, name in others),
    }


class GrpcioServer:
    """A grpcio server of the RPCs of ``host``."""

    def __init__(self, host: GrpcHost) -> None:
        self._host, self._options = host, host.engine.options
        #: The calls whose handlers run, and the tasks that wait for another message.
        self._running: set[asyncio.Task[Any]] = set()
        self._readers: set[asyncio.Task[Any]] = set()
        #: The number of calls that wait for their clients to read, and the time at which one last did.
        self._writing = 0
        self._wrote = 0.0

    draining = False
    _is_out_of_time = False

    async def start(self) -> int:
        """Listen, and return the port. Raises as `GrpcHost.serve`."""
        self._host.share_heap()
        options, address, files = self._options, self._host.address, self._host.tls
        credentials = None if files is None else await asyncio.to_thread(credentials_of, files)
        self._server: Server = grpc.aio.server(options=tuple(_arguments(options)))
        self._methods = _Methods()
        self._bind_all()
        if (log := self._host.engine.log) is not None:
            log.on_change.append(self._bind_all)
        self._server.add_generic_rpc_handlers((self._methods,))
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
            await self._server.start()
        except RuntimeError as error:
            self._host.require_free()
            raise Unavailable(f"can not listen on '{address}' for gRPC") from error
        return port

    async def stop(self) -> None:
        """Stop as `GrpcHost.serve` says."""
        self.draining = True
        for reader in tuple(self._readers):
            reader.cancel()
        stopping = asyncio.ensure_future(self._server.stop(self._host.stop_s))
        try:
            await self._stopped(stopping)
        finally:
            self._is_out_of_time = True
            for call in tuple(self._running):
                call.cancel()
            await asyncio.wait((stopping,), timeout=_LAST_WORDS_SECONDS)
            await self._server.stop(0)

    async def _stopped(self, stopping: asyncio.Future[None]) -> None:
        """Wait while there is time, and calls that still work or whose clients have read in the last `callers_s`."""
        loop = asyncio.get_running_loop()
        self._wrote = worked = now = loop.time()
        seconds = self._options.exit_timeout_secs
        end = now + self._host.stop_s - _LAST_WORDS_SECONDS
        while not stopping.done() and now < end:
            await asyncio.wait((stopping,), timeout=min(end - now, _LOOK_SECONDS))
            now = loop.time()
            if not self._running:  # what is left is to be sent by grpc's core, which does not say how far it is
                if now - worked > min(_UNREAD_SECONDS, seconds / 4):
                    return
                continue
            worked = now
            if len(self._running) != self._writing:
                self._wrote = now
            elif now - self._wrote > self._host.callers_s:
                return

    def _bind_all(self) -> None:
        """Answer further calls by the present handlers of all RPCs."""
        self._methods.bound = {f"/{rpc.service}/{rpc.name}": self._bind(rpc) for rpc in self._host.rpcs}

    def _bind(self, rpc: Rpc) -> grpc.RpcMethodHandler[Any, Any]:
        # Parsing and serializing happen in our calls, because grpcio shows the exceptions of its own.
        if rpc.stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._stream(rpc))
        return grpc.unary_unary_rpc_method_handler(self._unary(rpc))

    def _unary(self, rpc: Rpc) -> Callable[[bytes, Any], Awaitable[bytes]]:
        read, handler = self._host.reader(rpc), rpc.awaitable()

        async def answer(body: bytes, context: ServicerContext[Any, Any]) -> bytes:
            reading = read(body)
            del body  # see `_abort`
            return await handler(await reading, _Call(self, context))

        async def call(body: bytes, context: ServicerContext[Any, Any]) -> bytes:
            with self._counted():
                answering = answer(body, context)
                del body  # see `_abort`
                try:
                    return await answering
                except Exception as error:
                    await self._abort(context, error)
                except asyncio.CancelledError:
                    await self._excuse(context)
                    raise

        return call

    def _stream(self, rpc: Rpc) -> Callable[[AsyncIterator[bytes], Any], Awaitable[None]]:
        parsed, handler = self._parsed(rpc), rpc.stream
        assert handler is not None

        async def call(bodies: AsyncIterator[bytes], context: ServicerContext[Any, Any]) -> None:
            with self._counted():
                try:
                    await handler(parsed(bodies), partial(self._write, context), _Call(self, context))
                except grpc.aio.InternalError as error:
                    # A write under way when the client leaves fails before this task is cancelled.
                    raise asyncio.CancelledError from error
                except Exception as error:
                    await self._abort(context, error)
                except asyncio.CancelledError:
                    await self._excuse(context)
                    raise

        return call

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """The running call, for `stop`."""
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            yield
        finally:
            self._running.discard(task)

    async def _excuse(self, context: ServicerContext[Any, Any]) -> None:
        """A call is cancelled; if that was `stop`, its client hears why."""
        if self._is_out_of_time:
            await self._abort(context, Unavailable(self._host.out_of_time))

    async def _write(self, context: ServicerContext[Any, Any], body: bytes) -> None:
        self._writing += 1
        try:
            await context.write(body)
        finally:
            self._writing -= 1
            self._wrote = asyncio.get_running_loop().time()

    def _parsed(self, rpc: Rpc) -> Callable[[AsyncIterator[bytes]], AsyncIterator[Any]]:
        """Touches ``bodies`` when it is read: grpcio complains on stderr of those that are begun and not read."""
        read = self._host.reader(rpc)

        async def messages(bodies: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            self._require_more()
            iterator = aiter(bodies)
            while (body := await self._read(iterator)) is not None:
                yield await read(body)

        return messages

    async def _abort(self, context: ServicerContext[Any, Any], reason: Exception) -> NoReturn:
        """End the call with the status of ``reason``.

        grpc's core keeps what it is left with, and with it the frames on the way there: those of ``reason``, which
        have the message, are cut off.
        """
        code, details = self._host.status(reason)
        reason.__traceback__ = reason.__context__ = reason.__cause__ = None
        await context.abort(_STATUS_CODES[code], details, self._host.advice(reason))

    def _require_more(self) -> None:
        """Raise `Unavailable` if the server stops. Called before `aiter`, which grpcio wants to be read."""
        if self._takes_no_more():
            raise Unavailable(self._host.shutting_down)

    def _takes_no_more(self) -> bool:
        return self.draining and not self._is_out_of_time

    async def _read(self, bodies: AsyncIterator[bytes]) -> bytes | None:
        """The next message, or None after the last. Raises `Unavailable` when the server stops."""
        self._require_more()
        reader = asyncio.current_task()
        assert reader is not None
        self._readers.add(reader)
        try:
            return await anext(bodies, None)
        except asyncio.CancelledError:
            if self._takes_no_more():
                raise Unavailable(self._host.shutting_down) from None
            raise
        finally:
            self._readers.discard(reader)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # only its stub is generic
    """The table of all RPCs, by their paths."""

    bound: dict[str, grpc.RpcMethodHandler[Any, Any]]

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        return self.bound.get(handler_call_details.method)


class _Call:
    """One call, as handlers see it."""

    __slots__ = ("_context", "_server")

    def __init__(self, server: GrpcioServer, context: ServicerContext[Any, Any]) -> None:
        self._server, self._context = server, context

    @property
    def metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return tuple(self._context.invocation_metadata() or ())

    def only(self, name: bytes) -> str | None:
        key = name.decode()
        found = [value for other, value in self.metadata if other == key]
        if not found:
            return None
        return found[0] if len(found) == 1 and isinstance(found[0], str) else ""

    @property
    def deadline_ns(self) -> int:
        left_s = self._context.time_remaining()
        return 0 if left_s is None else monotonic_ns() + int(left_s * 1e9)

    @property
    def peer(self) -> str:
        kind, _, name = self._context.peer().partition(":")
        return unquote(name).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        found = self._context.auth_context()
        if "x509_common_name" not in found:
            return None
        others = [(kind, name) for kind, key in _NAMES.items() for name in found.get(key, ())]
        return _certificate(tuple(found["x509_common_name"]), tuple(others))

    @property
    def has_left(self) -> bool:
        # grpcio cancels the task of the call, and its context does not tell. Python 3.10 does not, either.
        cancelling = getattr(asyncio.current_task(), "cancelling", None)
        return cancelling is None or cancelling() > 0

    @property
    def draining(self) -> bool:
        return self._server.draining

    @property
    def streams(self) -> int:
        return 1


def credentials_of(files: TlsFiles) -> grpc.ServerCredentials:
    """Return what grpcio needs for TLS. Raises `ConfigError`: grpcio does not say what is wrong with files.

    Reads files, so call it on a thread. grpcio's core asks for changed files on its own threads, in each handshake.
    """
    changes = files.changes()

    def read() -> grpc.ServerCertificateConfiguration:
        files.read(["h2"])  # only for its errors
        files.require_no_revocations("grpcio")
        certificate, key, authorities = files.contents()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        if not changes.found():
            return None
        try:
            renewed = read()
        except ConfigError as error:
            log.error("gRPC keeps its former certificate: %s", error.message)
            return None
        log.info("gRPC uses the new certificate in '%s'", files.certificate[1])
        return renewed

    return grpc.dynamic_ssl_server_credentials(read(), changed, files.mutual)  # type: ignore[arg-type]


def _arguments(options: ServerOptions) -> list[tuple[str, int]]:
    """The channel arguments of ``options``; ages of connections are set only if given."""
    arguments = [
        ("grpc.max_receive_message_length", _MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MESSAGE_BYTES),
        ("grpc.server.max_pending_requests", _PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", _PENDING_CALLS),
        ("grpc.default_compression_level", _COMPRESSION_LEVELS[options.grpc_infer_response_compression_level]),
        ("grpc.so_reuseport", int(options.reuse_grpc_port)),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", options.grpc_keepalive_time),
        ("grpc.keepalive_timeout_ms", options.grpc_keepalive_timeout),
        ("grpc.keepalive_permit_without_calls", int(options.grpc_keepalive_permit_without_calls)),
        ("grpc.http2.max_pings_without_data", options.grpc_http2_max_pings_without_data),
        (
            "grpc.http2.min_ping_interval_without_data_ms",
            options.grpc_http2_min_recv_ping_interval_without_data,
        ),
        ("grpc.http2.max_ping_strikes", options.grpc_http2_max_ping_strikes),
    ]
    ages = (
        ("grpc.max_connection_age_ms", options.grpc_max_connection_age),
        ("grpc.max_connection_age_grace_ms", options.grpc_max_connection_age_grace),
    )
    return arguments + [(name, milliseconds) for name, milliseconds in ages if milliseconds]
