"""The RPCs on grpcio's asyncio server. The only module that knows how grpcio answers a call."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc.aio import Server, ServicerContext

from penstock.errors import CallerError, Code, InternalError, PenstockError
from penstock.frontends.grpc.context import Metadata
from penstock.frontends.grpc.rpcs import Rpc, Stream, Unary, serialize
from penstock.frontends.grpc.status import STATUS, details

log = logging.getLogger(__name__)


class Transport:
    """A grpcio server of ``rpcs`` and ``extra`` handlers. Not listening until `start`."""

    def __init__(
        self,
        rpcs: Iterable[Rpc],
        extra: Sequence[grpc.GenericRpcHandler[Any, Any]],
        arguments: Sequence[tuple[str, int]],
    ) -> None:
        """``arguments`` are grpc's channel arguments."""
        self.draining = False
        services: dict[str, dict[str, grpc.RpcMethodHandler[Any, Any]]] = defaultdict(dict)
        for rpc in rpcs:
            services[rpc.service][rpc.name] = self._bind(rpc)
        handlers = [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]
        self._server: Server = grpc.aio.server(options=tuple(arguments))
        self._server.add_generic_rpc_handlers((*handlers, *extra))

    async def start(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        """Listen on ``address`` (host:port) and return the port; raises RuntimeError if that fails."""
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        await self._server.start()
        return port

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, answer those in flight, and abort what is left after ``grace_s``.

        Cancelling aborts it at once.
        """
        self.draining = True
        try:
            await self._server.stop(grace_s)
        except asyncio.CancelledError:
            await self._server.stop(0)
            raise

    def _bind(self, rpc: Rpc) -> grpc.RpcMethodHandler[Any, Any]:
        # Parsing and serializing happen in our calls, because grpcio shows the exceptions of its own.
        if rpc.unary is not None:
            return grpc.unary_unary_rpc_method_handler(self._unary(rpc, rpc.unary))
        assert rpc.stream is not None
        return grpc.stream_stream_rpc_method_handler(self._stream(rpc, rpc.stream))

    def _unary(self, rpc: Rpc, handler: Unary) -> Callable[[bytes, Any], Awaitable[bytes]]:
        parse = rpc.parse

        async def call(body: bytes, context: ServicerContext[Any, Any]) -> bytes:
            try:
                return serialize(await handler(parse(body), _Call(self, context)))
            except Exception as error:
                await _abort(context, error)

        return call

    def _stream(self, rpc: Rpc, handler: Stream) -> Callable[[AsyncIterator[bytes], Any], Awaitable[None]]:
        parse = rpc.parse

        async def call(bodies: AsyncIterator[bytes], context: ServicerContext[Any, Any]) -> None:
            requests = (parse(body) async for body in bodies)
            try:
                await handler(requests, context.write, _Call(self, context))
            except grpc.aio.InternalError as error:
                # A write under way when the client leaves fails before this task is cancelled.
                raise asyncio.CancelledError from error
            except Exception as error:
                await _abort(context, error)

        return call


class _Call:
    """One call, as handlers see it."""

    __slots__ = ("_context", "_transport")

    def __init__(self, transport: Transport, context: ServicerContext[Any, Any]) -> None:
        self._transport, self._context = transport, context

    @property
    def metadata(self) -> Metadata:
        return tuple(self._context.invocation_metadata() or ())

    @property
    def draining(self) -> bool:
        return self._transport.draining


async def _abort(context: ServicerContext[Any, Any], reason: Exception) -> NoReturn:
    """End the call with the status of ``reason``; what is not ours is logged and not shown."""
    if isinstance(reason, DecodeError):
        reason = CallerError("Unable to parse request", Code.INTERNAL)
    if not isinstance(reason, PenstockError):
        log.error("a gRPC handler failed", exc_info=reason)
        reason = InternalError("internal error; the server's log has the details")
    await context.abort(STATUS[reason.code], details(reason.message))
