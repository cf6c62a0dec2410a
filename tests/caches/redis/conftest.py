"""A real Redis server: Debian's, which is installed if it is missing."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import redis

from headrace.telemetry import log_limits

_PROGRAM = "redis-server"
#: For a package index and a package.
_APT_S = 90


def _install() -> str:
    """Install Redis. Return the error; empty if it is installed now."""
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    quiet = ["env", "DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1"]  # and do not start it as a service
    apt = [*root, *quiet, "apt-get", "-q", "-o", "DPkg::Lock::Timeout=60"]
    try:
        for step in (["update"], ["install", "-y", "--no-install-recommends", _PROGRAM]):
            subprocess.run([*apt, *step], check=True, capture_output=True, text=True, timeout=_APT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{error}: {getattr(error, 'stderr', '')}"
    return ""


@pytest.fixture(scope="session")
def redis_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of ``redis-server``. If it cannot be installed, skip the test; in CI, fail it."""
    with (tmp_path_factory.getbasetemp().parent / "redis.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # shared by pytest's workers
        wrong = "" if shutil.which(_PROGRAM) else _install()
    found = shutil.which(_PROGRAM)
    if found is not None:
        return found
    text = f"there is no {_PROGRAM}, and apt-get could not install it: {wrong}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


@pytest.fixture(autouse=True)
def unhurried_log() -> None:
    """No test is short of lines because the one before it has logged the same ones."""
    log_limits.flush()


class TlsFiles(NamedTuple):
    """Paths of an authority, a server called localhost, and a client; and of an untrusted authority."""

    authority: str
    server: str
    server_key: str
    client: str
    client_key: str
    stranger: str


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("tls")
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificates of this test, and is not installed")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], check=True, capture_output=True, cwd=folder)

    for name in ("authority", "stranger"):
        files = ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
        run("req", "-x509", *new, "-days", "2", "-subj", f"/CN={name}", *files)
    for name in ("localhost", "client"):
        (folder / "names").write_text(f"subjectAltName=DNS:{name}")
        run("req", *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ["-CA", "authority.pem", "-CAkey", "authority.key", "-CAcreateserial", "-days", "2"]
        run("x509", "-req", "-in", f"{name}.csr", *signed, "-extfile", "names", "-out", f"{name}.pem")
    files = ["authority.pem", "localhost.pem", "localhost.key", "client.pem", "client.key", "stranger.pem"]
    return TlsFiles(*(str(folder / file) for file in files))


class RedisServer:
    """Start a Redis in memory on its own port. With ``files``, it accepts only TLS with a known client certificate."""

    def __init__(self, program: str, folder: Path, files: TlsFiles | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.settings = {"host": "127.0.0.1", "port": str(self.port)}
        self._words = [program, "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        if files is None:
            self._words += ["--port", str(self.port)]
            self.client = redis.Redis(port=self.port)
        else:
            self._words += ["--port", "0", "--tls-port", str(self.port), "--tls-ca-cert-file", files.authority]
            self._words += ["--tls-cert-file", files.server, "--tls-key-file", files.server_key]
            self.client = redis.Redis(
                port=self.port, ssl=True, ssl_ca_certs=files.authority, ssl_certfile=files.client,
                ssl_keyfile=files.client_key,
            )  # fmt: skip
        self.start()

    def start(self) -> None:
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            assert self._process.poll() is None, "redis-server has ended"
            try:
                self.client.ping()
                return
            except redis.ConnectionError:
                continue

    def stop(self) -> None:
        """Stop answering until `go_on`. Connections are still accepted."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        self.client.close()


@pytest.fixture
def redis_server(redis_program: str, tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(redis_program, tmp_path)
    yield server
    server.close()


@pytest.fixture
def tls_redis_server(redis_program: str, tmp_path: Path, tls_files: TlsFiles) -> Iterator[RedisServer]:
    server = RedisServer(redis_program, tmp_path, tls_files)
    yield server
    server.close()
