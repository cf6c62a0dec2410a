"""Starts the servers under test on the loopback, waits until they answer, and stops them."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from machine import free_ports

#: A language model takes half a minute, and more on a busy machine.
START_S = 240
BENCHMARKS = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers; ``start_s`` is the time from its start until it was ready."""

    name: str
    pid: int
    http: int
    grpc: int = 0
    metrics: int = 0
    start_s: float = 0.0

    @property
    def has_statistics(self) -> bool:
        return self.metrics > 0


@contextlib.contextmanager
def headrace(repository: Path, *flags: str, name: str = "headrace") -> Iterator[Running]:
    with _v2(name, [sys.executable, "-m", "headrace_cli", "serve"], repository, flags) as running:
        yield running


@contextlib.contextmanager
def program(name: str, path: Path, repository: Path, *flags: str) -> Iterator[Running]:
    """A ``headrace`` of another environment, or the ``tritonserver`` that yardsticks.py makes."""
    words = [str(path)] if path.name == "tritonserver" else [str(path), "serve"]
    with _v2(name, words, repository, flags) as running:
        yield running


def triton(yardsticks: Path, repository: Path) -> contextlib.AbstractContextManager[Running]:
    return program("triton", yardsticks / "tritonserver", repository)


@contextlib.contextmanager
def prototype(model: Path) -> Iterator[Running]:
    """The fastest known server in Python."""
    [port] = free_ports(1)
    with _process([sys.executable, str(BENCHMARKS / "shortest_path.py"), str(model), str(port)]) as process:
        yield Running("prototype", process.pid, port, start_s=_until(lambda: _listens(port), process))


@contextlib.contextmanager
def echo(server: str) -> Iterator[Running]:
    """A plain ASGI application that sends bodies back, on ``server``: hypercorn or uvicorn."""
    [port] = free_ports(1)
    with _process([sys.executable, str(BENCHMARKS / "echo.py"), server, str(port)]) as process:
        yield Running(f"echo on {server}", process.pid, port, start_s=_until(lambda: _listens(port), process))


@contextlib.contextmanager
def listening(command: Sequence[str], *ports: int) -> Iterator[int]:
    """Run ``command``, which listens on ``ports``, and yield its process id."""
    with _process(command) as process:
        _until(lambda: all(_listens(port) for port in ports), process)
        yield process.pid


@contextlib.contextmanager
def _v2(name: str, command: Sequence[str], repository: Path, flags: Sequence[str]) -> Iterator[Running]:
    http, grpc, metrics = free_ports(3)
    addresses = [f"--{part}-address=127.0.0.1" for part in ("http", "grpc", "metrics")]
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    with _process([*command, f"--model-repository={repository}", *addresses, *ports, *flags]) as process:
        start_s = _until(lambda: _is_ready(http), process)
        yield Running(name, process.pid, http, grpc, metrics, start_s)


@contextlib.contextmanager
def _process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield process
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-3000:])
            raise
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _until(is_true: object, process: subprocess.Popen[bytes]) -> float:
    assert callable(is_true)
    started = time.monotonic()
    while not is_true():
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with {process.returncode} before it was ready")
        if time.monotonic() - started > START_S:
            raise RuntimeError(f"{process.args!r} was not ready within {START_S} s")
        time.sleep(0.005)
    return time.monotonic() - started


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _listens(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
