"""TLS settings, with files made by openssl, and with its client."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.config.options import ServerOptions
from headrace.errors import ConfigError
from headrace_hosts import file_changes
from headrace_hosts.tls_files import grpc_tls, http_tls


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates ``a``, ``b`` (RSA), ``ec`` (another kind of key) and ``short``, and files that are none."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificates of this test, and is not installed")
    folder = tmp_path_factory.mktemp("pem")
    kinds = {"a": "rsa:2048", "b": "rsa:2048", "ec": "ec", "short": "rsa:1024"}
    for name, kind in kinds.items():
        curve = ["-pkeyopt", "ec_paramgen_curve:prime256v1"] if kind == "ec" else []
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
        subject = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
        command = [openssl, "req", "-x509", "-newkey", kind, *curve, "-nodes", "-days", "2", *subject, *files]
        subprocess.run(command, check=True, capture_output=True)
    locked = ["-in", str(folder / "a.key"), "-aes256", "-passout", "pass:secret", "-out", str(folder / "locked.key")]
    subprocess.run([openssl, "rsa", *locked], check=True, capture_output=True)
    der = ["-in", str(folder / "a.crt"), "-outform", "DER", "-out", str(folder / "der.crt")]
    subprocess.run([openssl, "x509", *der], check=True, capture_output=True)
    (folder / "empty").touch()
    os.mkfifo(folder / "fifo")
    (folder / "text").write_text("-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n")
    (folder / "directory").mkdir()
    return folder


def options(folder: Path, cert: str = "a.crt", key: str = "a.key", root: str = "", mutual: bool = False) -> Any:
    paths: dict[str, Any] = {
        f"grpc_{name}": str(folder / file) if file else ""
        for name, file in (("server_cert", cert), ("server_key", key), ("root_cert", root))
    }
    return ServerOptions(grpc_use_ssl=True, grpc_use_ssl_mutual=mutual, **paths)


def test_without_the_flags_there_is_no_tls() -> None:
    assert grpc_tls(ServerOptions(grpc_server_cert="/nowhere")) is None
    assert http_tls(ServerOptions(http_server_cert="/nowhere")) is None


def context(options: ServerOptions) -> ssl.SSLContext:
    """Return the context of the gRPC port."""
    files = grpc_tls(options)
    assert files is not None
    return files.context(["h2"])


NEEDED = "gRPC over TLS needs {}: the path of a PEM file"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cert": ""}, NEEDED.format("--grpc-server-cert")),
    ({"key": ""}, NEEDED.format("--grpc-server-key")),
    ({"mutual": True}, NEEDED.format("--grpc-root-cert")),
    ({"cert": "gone"}, "--grpc-server-cert: can not read '{}/gone': No such file or directory"),
    ({"key": "-----BEGIN PRIVATE KEY-----"},
     "--grpc-server-key: it was given the content of a PEM file; give the path of the file"),
    ({"key": "gone"}, "--grpc-server-key: can not read '{}/gone': No such file or directory"),
    ({"root": "gone"}, "--grpc-root-cert: can not read '{}/gone': No such file or directory"),
    ({"cert": "directory"}, "--grpc-server-cert: can not read '{}/directory': Is a directory"),
    *(({"cert": file}, f"--grpc-server-cert: '{{}}/{file}' is no certificate in PEM form")
      for file in ("empty", "text", "der.crt", "a.key")),
    *(({"root": file}, f"--grpc-root-cert: '{{}}/{file}' is no certificate in PEM form")
      for file in ("empty", "text", "der.crt")),
    *(({"key": file}, f"--grpc-server-key: '{{}}/{file}' is no private key in PEM form")
      for file in ("empty", "text", "a.crt")),
    ({"key": "b.key"}, "--grpc-server-key: the key in '{0}/b.key' does not fit the first certificate in '{0}/a.crt'"),
    ({"key": "ec.key"}, "--grpc-server-key: the key in '{0}/ec.key' does not fit the first certificate in '{0}/a.crt'"),
    ({"key": "locked.key"}, "--grpc-server-key: the key is encrypted; give one that needs no password"),
    ({"cert": "fifo"}, "--grpc-server-cert: '{}/fifo' is not a regular file"),
    ({"cert": "short.crt", "key": "short.key"}, "--grpc-server-cert: OpenSSL refuses '{}/short.crt': EE_KEY_TOO_SMALL"),
]  # fmt: skip


@pytest.fixture
def make() -> Callable[[ServerOptions], object]:
    """Return the TLS context that a host makes of the options. The tests of plugins have their own."""
    return context


@pytest.mark.parametrize(("files", "text"), REFUSED, ids=range(len(REFUSED)))
def test_a_file_that_will_not_do_is_named_with_its_flag(
    pem: Path, make: Callable[[ServerOptions], object], files: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(options(pem, **files))
    assert caught.value.message == text.format(pem)


def handshake(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[str | None, str | None]:
    """Version and protocol that the two agree on. Raises what the client sees."""
    ours, theirs = socket.socketpair()
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            with server.wrap_socket(ours, server_side=True) as connection:
                connection.sendall(b"x")
        except OSError as error:
            failures.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(theirs, server_hostname="localhost") as connection:
            if connection.recv(1) != b"x":  # in TLS 1.3 the server judges the client later
                raise ConnectionError
            return connection.version(), connection.selected_alpn_protocol()
    finally:
        ours.close()
        theirs.close()
        thread.join(10)


def client_of(pem: Path, identity: str = "") -> ssl.SSLContext:
    client = ssl.create_default_context(cafile=str(pem / "a.crt"))
    client.set_alpn_protocols(["h2", "http/1.1"])
    if identity:
        client.load_cert_chain(pem / f"{identity}.crt", pem / f"{identity}.key")
    return client


def made(**how: Any) -> ssl.SSLContext:
    return context(options(**how))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_http2_is_agreed_on_in_both_versions_of_tls(pem: Path, version: ssl.TLSVersion) -> None:
    client = client_of(pem)
    client.minimum_version = client.maximum_version = version
    spoken = "TLSv1.2" if version is ssl.TLSVersion.TLSv1_2 else "TLSv1.3"
    assert handshake(made(folder=pem), client) == (spoken, "h2")


def test_an_older_tls_is_refused(pem: Path) -> None:
    client = client_of(pem)
    with pytest.deprecated_call():
        client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_1
    client.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.raises(OSError):  # noqa: PT011  # the reason differs with OpenSSL's version and policy
        handshake(made(folder=pem), client)


@pytest.mark.parametrize("cipher", ["ECDHE-RSA-AES128-SHA256", "AES128-GCM-SHA256", "DHE-RSA-AES128-GCM-SHA256"])
def test_ciphers_that_http2_prohibits_are_refused(pem: Path, cipher: str) -> None:
    client = client_of(pem)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers(cipher)
    with pytest.raises(OSError):  # noqa: PT011
        handshake(made(folder=pem), client)


def test_mutual_tls_wants_a_certificate_of_the_authority(pem: Path) -> None:
    server = {"folder": pem, "root": "b.crt", "mutual": True}
    assert handshake(made(**server), client_of(pem, "b"))[1] == "h2"
    for stranger in ("", "ec"):
        with pytest.raises(OSError):  # noqa: PT011
            handshake(made(**server), client_of(pem, stranger))


def test_a_root_alone_demands_nothing(pem: Path) -> None:
    assert handshake(made(folder=pem, root="b.crt"), client_of(pem))[1] == "h2"


def test_a_revoked_certificate_is_refused(pem: Path, tmp_path: Path) -> None:
    """The list stands beside the authority, and is read again with it."""

    def openssl(*words: object) -> None:
        subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, cwd=tmp_path)

    (tmp_path / "index").touch()
    (tmp_path / "ca.cnf").write_text("[ca]\ndefault_ca=b\n[b]\ndatabase=index\ndefault_md=sha256\ndefault_crl_days=2\n")
    for name in ("good", "bad"):
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{name}.key"]
        openssl("req", *key, "-subj", f"/CN={name}", "-out", "request")
        issuer = ["-CA", pem / "b.crt", "-CAkey", pem / "b.key", "-set_serial", "7" if name == "bad" else "8"]
        openssl("x509", "-req", "-in", "request", *issuer, "-days", "2", "-out", f"{name}.crt")
    revoking = ["ca", "-config", "ca.cnf", "-cert", pem / "b.crt", "-keyfile", pem / "b.key"]
    openssl(*revoking, "-revoke", "bad.crt")
    openssl(*revoking, "-gencrl", "-out", "list")
    (pem / "revoking.crt").write_bytes((pem / "b.crt").read_bytes() + (tmp_path / "list").read_bytes())

    server: dict[str, Any] = {"folder": pem, "root": "revoking.crt", "mutual": True}
    for name, context in ((name, client_of(pem)) for name in ("good", "bad")):
        context.load_cert_chain(tmp_path / f"{name}.crt", tmp_path / f"{name}.key")
        if name == "good":
            assert handshake(made(**server), context)[1] == "h2"
        else:
            with pytest.raises(OSError):  # noqa: PT011
                handshake(made(**server), context)
            assert handshake(made(folder=pem, root="b.crt", mutual=True), context)[1] == "h2"
    files = grpc_tls(options(**server))
    assert files is not None
    with pytest.raises(ConfigError, match="has a list of revoked certificates, which the host grpcio can not check"):
        files.require_no_revocations("grpcio")


# ------------------------------------------------------------------ files that change


@pytest.fixture
def renewed(pem: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with copies of the certificates, whose changes count at once."""
    monkeypatch.setattr(file_changes, "CHECK_S", 0.0)
    folder = tmp_path / "pem"
    shutil.copytree(pem, folder, ignore=shutil.ignore_patterns("fifo"))
    return folder


def names(server: ssl.SSLContext, folder: Path, **client: str) -> str:
    """Return the name of the certificate that the server shows. The client trusts ``a`` and ``b``."""
    context = client_of(folder, **client)
    context.load_verify_locations(folder / "b.crt")
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=answer, args=(server, ours))
    thread.start()
    try:
        with context.wrap_socket(theirs, server_hostname="localhost") as connection:
            if connection.recv(1) != b"x":
                raise ConnectionError
            found: Any = connection.getpeercert()
            return str(dict(pair for (pair,) in found["subject"])["commonName"])
    finally:
        thread.join(10)


def answer(server: ssl.SSLContext, connection: socket.socket) -> None:
    with connection, suppress(OSError), server.wrap_socket(connection, server_side=True) as secure:
        secure.sendall(b"x")


def replace(folder: Path, name: str, by: str) -> None:
    shutil.copy(folder / by, folder / "new")
    (folder / "new").replace(folder / name)


def test_a_renewed_certificate_is_used_by_the_next_handshake(
    renewed: Path, pem: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = made(folder=renewed)
    assert names(server, pem) == "a"
    replace(renewed, "a.crt", "b.crt")
    assert names(server, pem) == "a"  # half of a renewal
    assert f"gRPC keeps its former certificate: --grpc-server-key: the key in '{renewed}/a.key'" in caplog.text
    assert names(server, pem) == "a"
    assert caplog.text.count("keeps its former certificate") == 1
    replace(renewed, "a.key", "b.key")
    assert names(server, pem) == "b"
    (renewed / "a.crt").unlink()
    os.mkfifo(renewed / "a.crt")  # would block a thread that opens it
    assert names(server, pem) == "b"


def test_the_protocol_is_agreed_on_by_a_renewed_certificate_too(renewed: Path) -> None:
    server = made(folder=renewed)
    replace(renewed, "a.key", "a.key")
    assert handshake(server, client_of(renewed))[1] == "h2"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_an_authority_that_was_removed_counts_at_once(renewed: Path, pem: Path, version: ssl.TLSVersion) -> None:
    server = made(folder=renewed, root="b.crt", mutual=True)
    client = client_of(pem, "b")
    client.minimum_version = client.maximum_version = version
    assert handshake(server, client)[1] == "h2"
    replace(renewed, "b.crt", "ec.crt")
    with pytest.raises(OSError):  # noqa: PT011
        handshake(server, client)
    assert handshake(server, client_of(pem, "ec"))[1] == "h2"


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_session_of_mutual_tls_is_not_resumed(pem: Path, version: ssl.TLSVersion) -> None:
    """A resumed session would not check the certificate again."""
    server = made(folder=pem, root="b.crt", mutual=True)
    client = client_of(pem, "b")
    client.minimum_version = client.maximum_version = version
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=answer, args=(server, ours))
    thread.start()
    with client.wrap_socket(theirs, server_hostname="localhost") as connection:
        assert connection.recv(1) == b"x"
        assert connection.session is None or not connection.session.has_ticket
    thread.join(10)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_session_without_client_certificates_is_resumed(pem: Path, version: ssl.TLSVersion) -> None:
    server, client = made(folder=pem), client_of(pem)
    client.minimum_version = client.maximum_version = version
    session, found = None, []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=answer, args=(server, ours))
        thread.start()
        with client.wrap_socket(theirs, server_hostname="localhost", session=session) as connection:
            assert connection.recv(1) == b"x"
            session = connection.session
            found.append(connection.session_reused)
        thread.join(10)
    assert found == [False, True]
