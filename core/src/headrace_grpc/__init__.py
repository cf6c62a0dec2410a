"""The gRPC frontend: ``inference.GRPCInferenceService`` for Triton's clients.

::

    stock client ── frontend ── rpc_table ── infer, stream_infer     ── decode, encode
                    or a plugin's   (one table,  control_plane, reflection
                    `GrpcHost`      restrictions)

A handler gets a parsed request and a `Context` (``rpc``), and returns a message or raises a `HeadraceError`. It is
independent of the transport.

``frontend`` turns the streams of `headrace_grpc.http2` into calls (``single_calls``, ``stream_calls``).
``call_headers`` reads their headers, and ``message_framing`` assembles their messages.
``wire``, ``decode`` and ``encode`` convert between protobuf and `InferRequest`/`InferResponse`;
``large_requests`` runs before them. Tensor bytes are views on the way in, and are copied once on the way out.

Options: the ``--grpc-*`` flags (``headrace serve --help``).
"""

from __future__ import annotations

from headrace import Extension, Frontend, hookimpl


@hookimpl
def register_frontends() -> list[type[Frontend]]:
    from headrace_grpc.frontend import GrpcFrontend

    return [GrpcFrontend]


@hookimpl
def register_extensions() -> list[type[Extension]]:
    from headrace_grpc.grpc_extensions import OWN

    return OWN
