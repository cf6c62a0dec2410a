"""gRPC by grpcio's asyncio server. The only module that knows how grpcio answers a call."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any, NoReturn
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import Server, ServicerContext

from penstock.config.options import CompressionLevel, ServerOptions
from penstock.errors import CallerError, Code, InternalError, PenstockError, Unavailable
from penstock.frontends.base import LAST_WORDS_S
from penstock.frontends.failures import tell_fault
from penstock.frontends.grpc import tls
from penstock.frontends.grpc.context import Metadata
from penstock.frontends.grpc.hosts import Host, address_of
from penstock.frontends.grpc.rpcs import Direct, Rpc, Stream, Unary, serialize
from penstock.frontends.grpc.status import STATUS, details
from penstock.frontends.grpc.wire import MESSAGE_BYTES
from penstock.frontends.large import Large
from penstock.telemetry.pacing import paced

log = paced(__name__)

#: In grpc's numbers. Its core picks an algorithm that the client accepts: gzip for low, else deflate.
#: It has no levels per RPC, so that they apply to all, where Triton compresses inference only.
_COMPRESSION_LEVELS: dict[CompressionLevel, int] = {"none": 0, "low": 1, "medium": 2, "high": 3}
_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioHost(Host):
    """A grpcio server of the RPCs."""

    draining = False

    async def start(self) -> int:
        options, address = self.options, address_of(self.options)
        credentials = await asyncio.to_thread(tls.credentials, options)
        self._server: Server = grpc.aio.server(options=tuple(_arguments(options)))
        self._server.add_generic_rpc_handlers(self._handlers())
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
            await self._server.start()
        except RuntimeError as error:
            raise Unavailable(_why_not(options, address)) from error
        return port

    async def stop(self) -> None:
        self.draining = True
        try:
            await self._server.stop(self.options.exit_timeout_secs + LAST_WORDS_S)
        except asyncio.CancelledError:
            await self._server.stop(0)
            raise

    def _handlers(self) -> tuple[grpc.GenericRpcHandler[Any, Any], ...]:
        services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = defaultdict(dict)
        for rpc in self.rpcs:
            services[rpc.service][rpc.name] = self._bind(rpc)
        return tuple(grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items())

    def _bind(self, rpc: Rpc) -> grpc.RpcMethodHandler[Any, Any]:
        # Parsing and serializing happen in our calls, because grpcio shows the exceptions of its own.
        if rpc.stream is not None:
            return grpc.stream_stream_rpc_method_handler(self._stream(rpc, rpc.stream))
        handler = rpc.unary if rpc.direct is None else _awaited(rpc.direct)
        assert handler is not None
        return grpc.unary_unary_rpc_method_handler(self._unary(rpc, handler))

    def _unary(self, rpc: Rpc, handler: Unary) -> Callable[[bytes, Any], Awaitable[bytes]]:
        parse, read_large = rpc.parse, rpc.parse_large or rpc.parse

        async def call(body: bytes, context: ServicerContext[Any, Any]) -> bytes:
            try:
                try:
                    request = parse(body)
                except Large:
                    request = await self.large.run(partial(read_large, body))
                return serialize(await handler(request, _Call(self, context)))
            except Exception as error:
                if rpc.unary is not None and isinstance(error, PenstockError):
                    tell_fault(error, rpc.name)
                await _abort(context, error)

        return call

    def _stream(self, rpc: Rpc, handler: Stream) -> Callable[[AsyncIterator[bytes], Any], Awaitable[None]]:
        parsed = self._parsed(rpc)

        async def call(bodies: AsyncIterator[bytes], context: ServicerContext[Any, Any]) -> None:
            try:
                await handler(parsed(bodies), context.write, _Call(self, context))
            except grpc.aio.InternalError as error:
                # A write under way when the client leaves fails before this task is cancelled.
                raise asyncio.CancelledError from error
            except Exception as error:
                await _abort(context, error)

        return call

    def _parsed(self, rpc: Rpc) -> Callable[[AsyncIterator[bytes]], AsyncIterator[Any]]:
        """Touches ``bodies`` when it is read: grpcio complains on stderr of those that are begun and not read."""
        parse, read_large = rpc.parse, rpc.parse_large or rpc.parse

        async def read(bodies: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for body in bodies:
                try:
                    request = parse(body)
                except Large:
                    request = await self.large.run(partial(read_large, body))
                yield request

        return read


class _Call:
    """One call, as handlers see it."""

    __slots__ = ("_context", "_host")

    def __init__(self, host: GrpcioHost, context: ServicerContext[Any, Any]) -> None:
        self._host, self._context = host, context

    @property
    def metadata(self) -> Metadata:
        return tuple(self._context.invocation_metadata() or ())

    @property
    def peer(self) -> str:
        kind, _, name = self._context.peer().partition(":")
        return unquote(name).rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""

    @property
    def draining(self) -> bool:
        return self._host.draining


def _awaited(handler: Direct) -> Unary:
    """``handler`` for a task that waits for its answer."""

    async def call(request: Any, context: Any) -> bytes:
        # An error is a result, too: as an exception it would be logged when the caller has gone.
        future: asyncio.Future[bytes | PenstockError] = asyncio.get_running_loop().create_future()

        def reply(answer: bytes | PenstockError) -> None:
            if not future.done():  # done: the caller has gone
                future.set_result(answer)

        cancel = handler(request, context, reply)
        try:
            answer = await future
        except asyncio.CancelledError:
            if cancel is not None:
                cancel()
            raise
        if isinstance(answer, PenstockError):
            raise answer
        return answer

    return call


async def _abort(context: ServicerContext[Any, Any], reason: Exception) -> NoReturn:
    """End the call with the status of ``reason``; what is not ours is logged and not shown."""
    if isinstance(reason, DecodeError):
        reason = CallerError("Unable to parse request", Code.INTERNAL)
    if not isinstance(reason, PenstockError):
        log.error("a gRPC handler failed", exc_info=reason)
        reason = InternalError("internal error; the server's log has the details")
    await context.abort(_STATUS_CODES[STATUS[reason.code]], details(reason.message))


def _arguments(options: ServerOptions) -> list[tuple[str, int]]:
    """The channel arguments of ``options``; ages of connections are set only if given."""
    arguments = [
        ("grpc.max_receive_message_length", MESSAGE_BYTES),
        ("grpc.max_send_message_length", MESSAGE_BYTES),
        ("grpc.default_compression_level", _COMPRESSION_LEVELS[options.grpc_infer_response_compression_level]),
        ("grpc.so_reuseport", int(options.reuse_grpc_port)),
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


def _why_not(options: ServerOptions, address: str) -> str:
    """grpc only says that it could not bind; binding once more gives the reason."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            options.grpc_address, options.grpc_port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return f"can not listen on '{address}' for gRPC: {error.strerror}"
    return f"Socket '{address}' already in use "
