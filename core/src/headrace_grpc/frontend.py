"""gRPC on our own HTTP/2: the fast host, and the default."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from math import inf
from typing import ClassVar

from headrace.config.option_parts import GrpcConnectionOptions, GrpcLimitOptions
from headrace.config.options import ServerOptions
from headrace.off_loop import OffLoopWork
from headrace.telemetry.log_limits import rate_limited_logger
from headrace_grpc.call_headers import CallHead, Refusal, extended, read_call
from headrace_grpc.calls import CallState, RefusedCall
from headrace_grpc.hosts import GrpcHost
from headrace_grpc.http2.connection import Connection
from headrace_grpc.http2.connections import Connections, Service
from headrace_grpc.http2.field_decoder import Fields
from headrace_grpc.http2.headers import RequestHeaders
from headrace_grpc.http2.lifetime import Keepalive
from headrace_grpc.http2.limits import Limits
from headrace_grpc.http2.stream import Stream
from headrace_grpc.rpc import Rpc
from headrace_grpc.single_calls import DirectCall, HeldCall, UnaryCall
from headrace_grpc.stream_calls import StreamCall
from headrace_hosts.accepting import accept
from headrace_hosts.held_memory import budget_of
from headrace_hosts.inflating import Take, new_memory
from headrace_hosts.listening import listen_grpc

#: A peer can break the rules at any rate, so this log is limited. The module imports nothing else of the server.
rate_limited_logger("headrace_grpc.http2.connection")


class GrpcFrontend(GrpcHost):
    """One `Connection` per client, on the server's own event loop."""

    name: ClassVar[str] = "grpc"

    async def serve(self) -> int:
        options = self.engine.options
        listener = await asyncio.to_thread(
            listen_grpc, options.grpc_address, options.grpc_port, options.reuse_grpc_port
        )
        budget = budget_of(self.engine)
        self._calls = Calls(self.rpcs, options, self.engine.off_loop_work, budget.take, budget.take_received)
        self._connections = connections = Connections(self._calls, _limits(options), _keepalive(options), budget)
        try:
            self._acceptor = await accept(
                lambda: Connection(connections),
                listener,
                self.tls,
                ("h2",),
                handshake_s=connections.limits.head_seconds,
            )
        except BaseException:
            listener.close()
            raise
        connections.watch()
        port: int = listener.getsockname()[1]
        return port

    async def stop(self) -> None:
        self._calls.draining = True
        self._acceptor.close()
        await self._connections.drain(self.stop_s, self.callers_s)


class Calls(CallState, Service["CallHead | Refusal"]):
    """Creates a call for each stream."""

    def __init__(
        self,
        rpcs: Sequence[Rpc],
        options: ServerOptions,
        large: OffLoopWork,
        take: Take = new_memory,
        take_received: Take = new_memory,
    ) -> None:
        super().__init__(options, large, take, take_received)
        self._table = {f"/{rpc.service}/{rpc.name}".encode(): rpc for rpc in rpcs}

    def interpret(self, headers: RequestHeaders) -> CallHead | Refusal:
        return read_call(self._table, self.compressor, headers)

    def extend(self, meaning: CallHead | Refusal, fields: Fields) -> CallHead | None:
        return None if isinstance(meaning, Refusal) else extended(meaning, fields)

    def trim_memory(self) -> None:
        self.large.release_memory_later()

    def open_held(self, connection: Connection, id: int, meaning: CallHead | Refusal) -> Stream:
        if isinstance(meaning, Refusal) or meaning.rpc.direct is None:
            return self.open(connection, id, meaning)  # small, or limited by itself
        return HeldCall(connection, id, self, meaning)

    def open(self, connection: Connection, id: int, meaning: CallHead | Refusal) -> Stream:
        if isinstance(meaning, Refusal):
            return RefusedCall(connection, id, meaning)
        rpc = meaning.rpc
        if rpc.direct is not None:
            return DirectCall(connection, id, self, meaning)
        return (StreamCall if rpc.unary is None else UnaryCall)(connection, id, self, meaning)


def _limits(options: GrpcLimitOptions) -> Limits:
    return Limits(
        unread_bytes=options.grpc_max_unread_size,
        received_bytes=options.grpc_max_received_size,
        held_bytes=options.grpc_max_held_size,
        unread_seconds=options.grpc_unread_timeout_secs,
        message_seconds=options.grpc_message_timeout_secs,
    )


def _keepalive(options: GrpcConnectionOptions) -> Keepalive:
    """Return the keepalive settings, in seconds; 0 means unset, or no limit."""
    return Keepalive(
        time=options.grpc_keepalive_time / 1000,
        timeout=options.grpc_keepalive_timeout / 1000,
        without_calls=options.grpc_keepalive_permit_without_calls,
        pings_without_data=options.grpc_http2_max_pings_without_data,
        peer_interval=options.grpc_http2_min_recv_ping_interval_without_data / 1000,
        strikes=options.grpc_http2_max_ping_strikes,
        max_age=options.grpc_max_connection_age / 1000 or inf,
        age_grace=options.grpc_max_connection_age_grace / 1000 or inf,
    )
