"""A real Redis server: Debian's, which is installed if it is missing."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

_PROGRAM = "redis-server"
#: For a package index and a package.
_APT_S = 90


def _install() -> str:
    """What went wrong; empty if Redis is there now."""
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
    """Where ``redis-server`` is. Skips where it cannot be installed, but fails in CI."""
    with (tmp_path_factory.getbasetemp().parent / "redis.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # pytest's other workers want it, too
        wrong = "" if shutil.which(_PROGRAM) else _install()
    found = shutil.which(_PROGRAM)
    if found is not None:
        return found
    text = f"there is no {_PROGRAM}, and apt-get could not install it: {wrong}"
    if os.environ.get("CI"):
        pytest.fail(text)
    pytest.skip(text)


class RedisServer:
    """One that keeps everything in memory, on a port of its own."""

    def __init__(self, program: str, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self.settings = {"host": "127.0.0.1", "port": str(self.port)}
        self._words = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.client = redis.Redis(port=self.port)
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
