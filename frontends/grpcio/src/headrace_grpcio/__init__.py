"""Another host of gRPC for Headrace: grpcio, and with it grpc's own core.

::

    headrace serve --grpc-server=grpcio ...

It answers what the native host answers, and takes the same flags ``--grpc-...``.
"""

from __future__ import annotations

from headrace import Frontend, hookimpl


@hookimpl
def register_frontends() -> list[type[Frontend]]:
    from headrace_grpcio.frontend import GrpcioFrontend

    return [GrpcioFrontend]
