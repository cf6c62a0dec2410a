"""Credentials for ``--grpc-use-ssl`` and ``--grpc-use-ssl-mutual`` (behaviours.md section 2.6)."""

from __future__ import annotations

from pathlib import Path

import grpc

from penstock.config.options import ServerOptions
from penstock.errors import ConfigError


def credentials(options: ServerOptions) -> grpc.ServerCredentials | None:
    """The credentials that ``options`` ask for, or None without TLS.

    Raises `ConfigError` naming the flag and the file that cannot be read.
    """
    if not options.grpc_use_ssl:
        return None
    mutual = options.grpc_use_ssl_mutual
    cert = _read("--grpc-server-cert", options.grpc_server_cert)
    key = _read("--grpc-server-key", options.grpc_server_key)
    root = _read("--grpc-root-cert", options.grpc_root_cert) if mutual or options.grpc_root_cert else None
    return grpc.ssl_server_credentials([(key, cert)], root, mutual)


def _read(flag: str, path: str) -> bytes:
    if not path:
        raise ConfigError(f"gRPC over TLS needs {flag}: the path of a PEM file")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: can not read '{path}': {error.strerror}") from error
