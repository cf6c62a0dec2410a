"""TLS from PEM files, for a frontend that ends TLS itself. Everything here reads files, so call it on a thread."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeAlias

from headrace.errors import ConfigError

#: A flag and the path that it was given; an empty path if it was not given.
PemFile: TypeAlias = "tuple[str, str]"

#: The ciphers of TLS 1.2 that RFC 9113 does not prohibit. It prohibits none of TLS 1.3.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20:@SECLEVEL=2"
#: OpenSSL's reasons for a key that does not belong to the certificate.
_MISFITS = {"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The PEM files of a server. ``service`` names it in errors. If ``mutual``, clients need a certificate, too."""

    service: str
    certificate: PemFile
    key: PemFile
    #: The authorities that sign the certificates of clients.
    authorities: PemFile
    mutual: bool = False

    def context(self, protocols: Sequence[str]) -> ssl.SSLContext:
        """Return a context for a server that speaks ``protocols``, the best first (ALPN).

        Raises `ConfigError` naming the flag and the file that is missing, can not be read, is not PEM, or does not
        fit.
        """
        result = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        result.minimum_version = ssl.TLSVersion.TLSv1_2
        result.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
        result.set_ciphers(_CIPHERS)
        result.set_alpn_protocols(list(protocols))
        self.contents()  # validates that the files can be read
        # Validates that the file is a PEM certificate. The context is discarded.
        _load_authorities(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.certificate)
        self._load_identity(result)
        if self.authorities[1]:
            _load_authorities(result, self.authorities)
        if self.mutual:
            result.verify_mode = ssl.CERT_REQUIRED
            result.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # as in grpc, any authority given is trusted
        return result

    def contents(self) -> tuple[bytes, bytes, bytes | None]:
        """Return certificate, key and authorities, or None for the latter. Raises `ConfigError` as `context`."""
        certificate, key = self._read(self.certificate), self._read(self.key)
        return certificate, key, self._read(self.authorities) if self.mutual or self.authorities[1] else None

    def _read(self, file: PemFile) -> bytes:
        flag, path = file
        if not path:
            raise ConfigError(f"{self.service} over TLS needs {flag}: the path of a PEM file")
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"{flag}: can not read '{path}': {error.strerror}") from error

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
                    f"{key_flag}: the key in '{key}' does not fit the certificate in '{certificate}'"
                ) from error
            if error.reason and error.reason.startswith(("EE_", "CA_")):  # too short a key, too weak a digest
                raise ConfigError(f"{certificate_flag}: OpenSSL refuses '{certificate}': {error.reason}") from error
            raise ConfigError(f"{key_flag}: '{key}' is no private key in PEM form") from error


def _load_authorities(into: ssl.SSLContext, file: PemFile) -> None:
    flag, path = file
    try:
        into.load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"{flag}: '{path}' is no certificate in PEM form") from error
