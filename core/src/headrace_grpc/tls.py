"""TLS for ``--grpc-use-ssl`` and ``--grpc-use-ssl-mutual`` (docs/spec/behaviours.md section 2.6)."""

from __future__ import annotations

import ssl

from headrace.config.option_parts import GrpcTlsOptions
from headrace.frontends.tls_files import TlsFiles


def files(options: GrpcTlsOptions) -> TlsFiles | None:
    """Return the files that ``options`` name for gRPC; None without TLS."""
    if not options.grpc_use_ssl:
        return None
    return TlsFiles(
        service="gRPC",
        certificate=("--grpc-server-cert", options.grpc_server_cert),
        key=("--grpc-server-key", options.grpc_server_key),
        authorities=("--grpc-root-cert", options.grpc_root_cert),
        mutual=options.grpc_use_ssl_mutual,
    )


def context(options: GrpcTlsOptions) -> ssl.SSLContext | None:
    """Return TLS for HTTP/2 and nothing else; None without TLS. Raises as `TlsFiles.context`. Reads files."""
    found = files(options)
    return None if found is None else found.context(["h2"])
