"""The gRPC endpoint of a server: options to a listening transport (behaviours.md section 2.6)."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from penstock.config.options import CompressionLevel, ServerOptions
from penstock.errors import Unavailable
from penstock.frontends.base import Frontend
from penstock.frontends.grpc import reflection, tls
from penstock.frontends.grpc.rpcs import rpcs
from penstock.frontends.grpc.transport import Transport
from penstock.frontends.grpc.wire import MESSAGE_BYTES

log = logging.getLogger(__name__)

#: In grpc's numbers. Its core picks an algorithm that the client accepts: gzip for low, else deflate.
#: It has no levels per RPC, so that they apply to all, where Triton compresses inference only.
_COMPRESSION_LEVELS: dict[CompressionLevel, int] = {"none": 0, "low": 1, "medium": 2, "high": 3}


class GrpcFrontend(Frontend):
    """``inference.GRPCInferenceService``, health and reflection. ``port`` is set by `start`."""

    name = "grpc"
    port = 0
    _transport: Transport | None = None

    @property
    def enabled(self) -> bool:
        return self.server.options.allow_grpc

    async def start(self) -> None:
        """Listen. Raises `Unavailable` naming a busy address and `ConfigError` for the TLS files."""
        options = self.server.options
        credentials = await asyncio.to_thread(tls.credentials, options)
        address = _address(options)
        transport = Transport(rpcs(self.server), reflection.handlers(), _arguments(options))
        try:
            self.port = await transport.start(address, credentials)
        except RuntimeError as error:
            raise Unavailable(_why_not(options, address)) from error
        self._transport = transport
        log.info("Started GRPCInferenceService at %s:%d", options.grpc_address, self.port)

    async def stop(self) -> None:
        if self._transport is not None:
            await self._transport.stop(self.server.options.exit_timeout_secs)
            self._transport = None


def _address(options: ServerOptions) -> str:
    host = options.grpc_address
    return f"[{host}]:{options.grpc_port}" if ":" in host else f"{host}:{options.grpc_port}"


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
