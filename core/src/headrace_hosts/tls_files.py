"""TLS from PEM files, with Mozilla's intermediate settings (https://wiki.mozilla.org/Security/Server_Side_TLS).

Everything here reads files. Create contexts on a thread. The event loop reads the state of the files in a handshake, at
most once per second, and their contents only if they have changed.
"""

from __future__ import annotations

import logging
import ssl
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from headrace.config.option_parts import GrpcTlsOptions, HttpTlsOptions
from headrace.errors import ConfigError
from headrace_hosts.client_hello import offered_groups
from headrace_hosts.file_changes import FileChanges

#: What it writes is in the audit log, too.
log = logging.getLogger("headrace.audit.tls")

#: A flag and the path that it was given; an empty path if it was not given.
PemFile: TypeAlias = "tuple[str, str]"

#: The ciphers of TLS 1.2 that RFC 9113 does not prohibit. It prohibits none of TLS 1.3.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=2"
#: The groups for the key exchange by their numbers of RFC 8446: X25519, P-256 and P-384. OpenSSL also has FFDHE, where
#: a client can make the server compute for 100 ms. Python can tell it one group, so each has a context of its own.
_GROUPS = {29: "X25519", 23: "prime256v1", 24: "secp384r1"}
#: Begins a list of revoked certificates, which may stand beside the authorities.
_REVOCATIONS = b"-----BEGIN X509 CRL-----"
#: OpenSSL's reasons for a key that does not belong to the certificate.
_MISFITS = {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The PEM files of a server. ``service`` names it in errors. If ``mutual``, clients need a certificate, too."""

    service: str
    certificate: PemFile
    key: PemFile
    #: The authorities that sign the certificates of clients. With their lists of revoked certificates, if there is one.
    authorities: PemFile
    mutual: bool = False

    def context(self, protocols: Sequence[str]) -> ssl.SSLContext:
        """Return a context for a server that speaks ``protocols``, the best first (ALPN).

        If the files change, the handshakes that begin a second later use the new ones. If the new ones do not fit, the
        server logs the reason and keeps the old ones. Raises `ConfigError` naming the flag and the file that is
        missing, can not be read, is not PEM, or does not fit.
        """
        return _Reloading(self, protocols).first

    def contexts(self, protocols: Sequence[str]) -> TlsContexts:
        """Return contexts as `context`, of which each has one safe group for the key exchange."""
        return TlsContexts(self, protocols)

    def changes(self) -> FileChanges:
        """Return an object that finds later changes of the files. For hosts that do not use `context`."""
        return FileChanges(*(path for _, path in (self.certificate, self.key, self.authorities)))

    def read(self, protocols: Sequence[str]) -> ssl.SSLContext:
        """Return `context` for the present content of the files, without its changes."""
        result = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        result.minimum_version = ssl.TLSVersion.TLSv1_2
        result.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        result.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE  # the client knows what its processor is fast at
        result.set_ciphers(_CIPHERS)
        result.set_alpn_protocols(list(protocols))
        result.num_tickets = 1  # of two, OpenSSL's default, a client that keeps its connection uses none
        authorities = self.contents()[2]  # validates that the files can be read
        # Validates that the file is a PEM certificate. The context is discarded.
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.certificate)
        self._load_identity(result)
        if self.authorities[1]:
            _load_authorities(result, self.authorities)
        if self.mutual:
            result.verify_mode = ssl.CERT_REQUIRED
            result.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in grpc, any authority given is trusted
            result.options |= ssl.OP_NO_TICKET  # a resumed session would not check the certificate again
            result.num_tickets = 0  # the same for TLS 1.3
            if authorities is not None and _REVOCATIONS in authorities:
                result.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
        return result

    def contents(self) -> tuple[bytes, bytes, bytes | None]:
        """Return certificate, key and authorities, or None for the latter. Raises `ConfigError` as `context`."""
        certificate, key = self._read(self.certificate), self._read(self.key)
        return certificate, key, self._read(self.authorities) if self.mutual or self.authorities[1] else None

    def require_no_revocations(self, host: str) -> None:
        """Raise `ConfigError` if the files have a list of revoked certificates, which ``host`` can not check."""
        authorities = self.contents()[2]
        if authorities is not None and _REVOCATIONS in authorities:
            flag, path = self.authorities
            raise ConfigError(
                f"{flag}: '{path}' has a list of revoked certificates, which the host {host} can not check"
            )

    def _read(self, file: PemFile) -> bytes:
        flag, path = file
        if not path:
            raise ConfigError(f"{self.service} over TLS needs {flag}: the path of a PEM file")
        if "-----BEGIN " in path:
            raise ConfigError(f"{flag}: it was given the content of a PEM file; give the path of the file")
        try:
            mode = Path(path).stat().st_mode
            if stat.S_ISREG(mode) or stat.S_ISDIR(mode):  # opening another kind of file may block
                return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag}: can not read '{path}': {error.strerror}") from error
        raise ConfigError(f"{flag}: '{path}' is not a regular file")

    def _load_identity(self, into: ssl.SSLContext) -> None:
        """Load certificate and key. Raise `ConfigError` if they do not fit."""
        (certificate_flag, certificate), (key_flag, key) = self.certificate, self.key

        def refuse_password() -> NoReturn:  # OpenSSL would ask at the terminal
            raise ConfigError(f"{key_flag}: the key is encrypted; give one that needs no password")

        try:
            into.load_cert_chain(certificate, key, refuse_password)
        except ssl.SSLError as error:
            if error.reason in _MISFITS:
                raise ConfigError(
                    f"{key_flag}: the key in '{key}' does not fit the first certificate in '{certificate}'"
                ) from error
            if error.reason and error.reason.startswith(("EE_", "CA_")):  # too short a key, too weak a digest
                raise ConfigError(f"{certificate_flag}: OpenSSL refuses '{certificate}': {error.reason}") from error
            raise ConfigError(f"{key_flag}: '{key}' is no private key in PEM form") from error


def http_tls(options: HttpTlsOptions) -> TlsFiles | None:
    """Return the files of ``--http-use-ssl`` and the flags beside it; None without TLS."""
    if not options.http_use_ssl:
        return None
    return TlsFiles(
        service="HTTP",
        certificate=("--http-server-cert", options.http_server_cert),
        key=("--http-server-key", options.http_server_key),
        authorities=("--http-root-cert", options.http_root_cert),
        mutual=options.http_use_ssl_mutual,
    )


def grpc_tls(options: GrpcTlsOptions) -> TlsFiles | None:
    """Return the files of ``--grpc-use-ssl`` and the flags beside it (docs/spec/behaviours.md section 2.6)."""
    if not options.grpc_use_ssl:
        return None
    return TlsFiles(
        service="gRPC",
        certificate=("--grpc-server-cert", options.grpc_server_cert),
        key=("--grpc-server-key", options.grpc_server_key),
        authorities=("--grpc-root-cert", options.grpc_root_cert),
        mutual=options.grpc_use_ssl_mutual,
    )


class TlsContexts:
    """The contexts for handshakes, of the latest files that fit. On one event loop; create it on a thread."""

    def __init__(self, files: TlsFiles, protocols: Sequence[str]) -> None:
        self._files, self._protocols = files, protocols
        self._changes = files.changes()
        self._latest = self._read()

    def choose(self, hello: bytes) -> ssl.SSLContext:
        """Return the context for a client that begins with ``hello``. Reads the files if they have changed."""
        if self._changes.are_due() and self._changes.found():
            self._reload()
        latest = self._latest
        for group in offered_groups(hello):
            if group in latest:
                return latest[group]
        return next(iter(latest.values()))

    def _read(self) -> dict[int, ssl.SSLContext]:
        found = {}
        for number, name in _GROUPS.items():
            context = self._files.read(self._protocols)
            try:
                context.set_ecdh_curve(name)
            except (ValueError, ssl.SSLError):
                continue  # X25519 before OpenSSL 3
            found[number] = context
        return found

    def _reload(self) -> None:
        try:
            self._latest = self._read()
        except (ConfigError, OSError) as error:  # OSError: a file was removed while it was read
            log.error("%s keeps its former certificate: %s", self._files.service, error)
        else:
            log.info("%s uses the new certificate in '%s'", self._files.service, self._files.certificate[1])


class _Reloading(TlsContexts):
    """The context of a library with handshakes of its own: they begin with ``first``, and go on with the latest."""

    def __init__(self, files: TlsFiles, protocols: Sequence[str]) -> None:
        super().__init__(files, protocols)
        self.first = self._latest[0]
        self.first.sni_callback = self._continue

    def _read(self) -> dict[int, ssl.SSLContext]:
        return {0: self._files.read(self._protocols)}

    def _continue(self, handshake: Any, name: str | None, context: ssl.SSLContext) -> None:
        """Called by OpenSSL in each handshake, with or without the name of a server."""
        handshake.context = self.choose(b"")


def _load_authorities(into: ssl.SSLContext, file: PemFile) -> None:
    flag, path = file
    try:
        into.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag}: '{path}' is no certificate in PEM form") from error
