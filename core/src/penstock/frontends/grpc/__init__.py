"""The gRPC frontend: ``inference.GRPCInferenceService`` as Triton's clients know it.

::

    stock client ── transport ── rpcs ── health, metadata, statistics, repository, infer, stream ...
                    (grpcio)     (one table, restrictions)      (plain async functions)

A handler takes a parsed request and a `Context`, and returns a message or raises a
`PenstockError`; it knows no transport. ``transport`` is the only module that speaks to grpcio, so
that another transport can serve the same table. ``wire``, ``decode`` and ``encode`` stand between
protobuf and `InferRequest`/`InferResponse`; tensor bytes are views on the way in and are copied
once on the way out.

Options: the ``--grpc-*`` flags (``penstock serve --help``).
"""
