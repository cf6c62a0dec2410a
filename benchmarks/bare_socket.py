"""An engine behind a bare socket: the minimal server in Python.

A blocking thread reads a request, runs the engine on the end of its body, and writes the result. It has one connection,
and no real protocol, errors or statistics. Like any server, but unlike an engine in a loop, it is woken for every
request, when other programs have used the CPU's caches. ``bare_socket.py ENGINE FOLDER THREADS`` serves the files that
frameworks.py wrote to FOLDER, one connection after the other, and prints the CPU time per request of each connection in
microseconds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import suppress
from math import prod
from pathlib import Path

import numpy as np
from framework import Call
from frameworks import FRAMEWORKS, Direct
from measure import Case
from networks import SHAPES
from servers import Running

_HEAD_END = b"\r\n\r\n"
_SIZE = b"Content-Length: "
_MOST_BYTES = 1 << 20


class BareSocket:
    """``engine`` behind a bare socket, in another process. A context manager."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        words = [sys.executable, __file__, engine, str(folder), str(threads)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self._server = Running("bare socket", self._process.pid, int(self._output.readline()))

    def __enter__(self) -> BareSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def ask(self, case: Case, seconds: float) -> Direct:
        """Send the load of ``case``, which has one connection. Raises `load.LoadFailed`."""
        for part_s in (min(1.0, seconds), seconds):  # the first is the warm-up
            seen = case.put(self._server, part_s)
            cpu_us = float(self._output.readline())
        return Direct(seen.rps, cpu_us)


def _serve(engine: str, folder: Path, threads: int) -> None:
    framework = FRAMEWORKS[engine]
    calls = {
        f"{each}_{engine}": framework.open(folder / f"{each}_{engine}" / "1", threads) for each in framework.networks
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection:
                if data := connection.recv(_MOST_BYTES):  # wrk first connects once without a request
                    model = data.split(b"/", 4)[3].decode()
                    print(_answer(connection, data, calls[model], SHAPES[model.removesuffix(f"_{engine}")]), flush=True)


def _answer(connection: socket.socket, data: bytes, call: Call, shape: tuple[int, ...]) -> float:
    """Answer ``data`` and the following requests. Return the CPU time per request in microseconds."""
    size, used, count = 4 * prod(shape), time.process_time(), 0
    with suppress(ConnectionError):  # wrk closes the connection within a request
        while data:
            end = data.index(_HEAD_END)
            begin = data.index(_SIZE) + len(_SIZE)
            total = end + len(_HEAD_END) + int(data[begin : data.index(b"\r", begin)])
            while len(data) < total:
                if not (more := connection.recv(_MOST_BYTES)):
                    raise ConnectionError
                data += more
            # OpenVINO accepts only writable arrays.
            rows = np.frombuffer(bytearray(data), np.float32, size // 4, len(data) - size).reshape(1, *shape)
            answer = call(rows).tobytes()
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(answer), answer))
            count += 1
            data = connection.recv(_MOST_BYTES)
    return (time.process_time() - used) / max(1, count) * 1e6


if __name__ == "__main__":
    _serve(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
