"""TLS for ``--grpc-use-ssl`` and ``--grpc-use-ssl-mutual`` (docs/spec/behaviours.md section 2.6).

The functions read files, so call them on a thread.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from headrace.config.options import ServerOptions
from headrace.errors import ConfigError

if TYPE_CHECKING:
    import grpc

_CERT, _KEY, _ROOT = "--grpc-server-cert", "--grpc-server-key", "--grpc-root-cert"
#: The ciphers of TLS 1.2 that RFC 9113 allows. TLS 1.3 has no others.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=2"
#: OpenSSL's reasons for a wrong key of the same kind, and of another kind.
_MISFITS = {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"}


def context(options: ServerOptions) -> ssl.SSLContext | None:
    """Return the TLS context of ``options``, for HTTP/2 only; None without TLS.

    Raises `ConfigError` with the flag and the file that is missing, unreadable, not PEM, or does not fit.
    """
    if not options.grpc_use_ssl:
        return None
    cert, key = options.grpc_server_cert, options.grpc_server_key
    result = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    result.minimum_version = ssl.TLSVersion.TLSv1_2
    result.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    result.set_ciphers(_CIPHERS)
    result.set_alpn_protocols(["h2"])
    _read(_CERT, cert)
    _read(_KEY, key)
    _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), _CERT, cert)  # only to check that it is a certificate
    _load_identity(result, cert, key)
    if options.grpc_use_ssl_mutual or options.grpc_root_cert:
        _read(_ROOT, options.grpc_root_cert)
        _load_authorities(result, _ROOT, options.grpc_root_cert)
    if options.grpc_use_ssl_mutual:
        result.verify_mode = ssl.CERT_REQUIRED
        result.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in grpc, any given authority is trusted
    return result


def credentials(options: ServerOptions) -> grpc.ServerCredentials | None:
    """The same for grpcio, whose errors do not name the file. Raises like `context`."""
    if context(options) is None:
        return None
    import grpc

    mutual = options.grpc_use_ssl_mutual
    pair = _read(_KEY, options.grpc_server_key), _read(_CERT, options.grpc_server_cert)
    root = _read(_ROOT, options.grpc_root_cert) if options.grpc_root_cert else None
    return grpc.ssl_server_credentials([pair], root, mutual)


def _read(flag: str, path: str) -> bytes:
    if not path:
        raise ConfigError(f"gRPC over TLS needs {flag}: the path of a PEM file")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag}: can not read '{path}': {error.strerror}") from error


def _load_authorities(into: ssl.SSLContext, flag: str, path: str) -> None:
    try:
        into.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag}: '{path}' is no certificate in PEM form") from error


def _load_identity(into: ssl.SSLContext, cert: str, key: str) -> None:
    """Raise for the remaining errors of two files, of which the first is a certificate."""
    try:
        into.load_cert_chain(cert, key, _refuse_password)
    except ssl.SSLError as error:
        if error.reason in _MISFITS:
            raise ConfigError(f"{_KEY}: the key in '{key}' does not fit the certificate in '{cert}'") from error
        if error.reason and error.reason.startswith(("EE_", "CA_")):  # a key too short, or a digest too weak
            raise ConfigError(f"{_CERT}: OpenSSL refuses '{cert}': {error.reason}") from error
        raise ConfigError(f"{_KEY}: '{key}' is no private key in PEM form") from error


def _refuse_password() -> NoReturn:
    # OpenSSL would prompt at the terminal.
    raise ConfigError(f"{_KEY}: the key is encrypted; give one that needs no password")
