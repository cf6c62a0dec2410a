"""The gRPC frontend: ``inference.GRPCInferenceService`` as Triton's clients know it.

::

    stock client ── native_host ── rpc_table ── infer, stream_infer     ── decode, encode
                    grpcio_host    (one table,  control_plane, reflection
                                   restrictions)

A handler takes a parsed request and a `Context` (``rpc``), and returns a message or raises a
`HeadraceError`; it knows no transport. ``native_host`` makes calls (``single_calls``, ``stream_calls``) of the streams
of `headrace_grpc.http2`: their headers are read in ``call_headers``, their messages put together in
``message_framing``. ``grpcio_host`` is the only module that imports grpcio. ``wire``, ``decode`` and ``encode`` stand
between protobuf and `InferRequest`/`InferResponse`, and ``large_requests`` before them; tensor bytes are views on the
way in and are copied once on the way out.

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
