"""The gRPC frontend: ``inference.GRPCInferenceService`` as Triton's clients know it.

::

    stock client ── native_host ── rpcs ── health, metadata, statistics, repository, infer, stream ...
                    grpcio_host    (one table, restrictions)    (plain functions, most of them async)

A handler takes a parsed request and a `Context`, and returns a message or raises a
`HeadraceError`; it knows no transport. ``native_host`` makes ``calls`` of the streams of
`headrace.frontends.http2`; ``grpcio_host`` is the only module that imports grpcio. ``wire``,
``decode`` and ``encode`` stand between protobuf and `InferRequest`/`InferResponse`; tensor bytes
are views on the way in and are copied once on the way out.

Options: the ``--grpc-*`` flags (``headrace serve --help``).
"""
