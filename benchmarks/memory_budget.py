"""Attacks on the memory of a server: tests that it stays within ``--memory-budget``, answers others, and survives.

    python benchmarks/memory_budget.py [--budget 1073741824] [--callers 1000] [--only NAME,...] [--ulimit BYTES]
                                       [--cgroup DIRECTORY] [--http-server hypercorn]

Each attack has a new server with a model that returns its input. Meanwhile another caller requests health 50 times per
second, and 1 MiB once per second. Prints one line per attack: the maximum growth of resident memory over the budget;
p50, p99 and maximum of health; and the statuses of the attackers and of the others. Exits with 1 if memory is over the
budget plus 20 %, health has a p99 over 50 ms, or the server exits.

=============  ======================================================================================================
``slow``       callers that each send 16 MiB over HTTP, at 0.5 MiB/s
``half``       callers that send half of 16 MiB over HTTP as fast as they can, and stop
``fast``       callers that send 16 MiB over HTTP as fast as they can, and read the response; all must be answered
``streams``    callers that send messages of 16 MiB over gRPC: 8 streams each, at 0.5 MiB/s together
``announced``  the same, but only 5 bytes of each message are sent
``small``      callers that send messages of 200 KB over gRPC on 100 streams each, without the last byte
``bombs``      callers that send gzip of 60 MiB of zeros over HTTP
``unread``     callers that ask for 8 MiB each over HTTP, and do not read the response
=============  ======================================================================================================

``--ulimit`` limits the addresses of the server (``ulimit -v``), ``--cgroup`` puts it into an existing control group of
version 1 or 2. Without ``--budget``, the budget is then the server's default.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

MIB = 1 << 20
CONFIG = """
backend: "identity" max_batch_size: 0
input { name: "IN" data_type: TYPE_UINT8 dims: [ -1 ] } output { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] }
"""
P99_MS, OVER = 50, 1.2
ASKED_PER_S = 50

Attack = Callable[["Server", int], Awaitable[Counter[str]]]


class Server:
    """``headrace serve`` with an identity model."""

    def __init__(self, arguments: argparse.Namespace, repository: str) -> None:
        words = ["--model-repository", repository, f"--http-server={arguments.http_server}", "--memory-wait-secs=10"]
        words += [f"--memory-budget={arguments.budget}"] if arguments.budget else []
        words += [
            f"--{name}-{what}" for name in ("http", "grpc", "metrics") for what in ("address=127.0.0.1", "port=0")
        ]

        def limit() -> None:
            if arguments.ulimit:
                resource.setrlimit(resource.RLIMIT_AS, (arguments.ulimit, arguments.ulimit))
            if arguments.cgroup:
                Path(arguments.cgroup, "cgroup.procs").write_text(str(os.getpid()))

        self.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("headrace")), "serve", *words],
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,
        )
        self.pid = self.process.pid
        self.ports: dict[str, int] = {}
        self.budget = arguments.budget
        self.log: list[str] = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if found := re.search(r"Started (\w+)(?: Service)? at \S+:(\d+)", line):
                self.ports[found[1]] = int(found[2])
            if found := re.search(r"Memory budget .*: ([0-9.]+) (.)iB", line):
                self.budget = self.budget or int(float(found[1]) * (1 << (30 if found[2] == "G" else 20)))
                print("   ", line.strip(), flush=True)
            if len(self.ports) == 3:
                break
        else:
            raise SystemExit("the server did not start:\n" + "".join(self.log))
        self.http, self.grpc = self.ports["HTTPService"], self.ports["GRPCInferenceService"]
        self.metrics = self.ports["Metrics"]

    def drain(self) -> None:
        """Read the log, so that the server does not block on it."""
        assert self.process.stderr is not None
        self.log += self.process.stderr

    def memory(self, name: str) -> int:
        found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found
        return int(found[1]) * 1024


# ---------------------------------------------------------------------- attacks


def infer(size: int, extra: str = "") -> bytes:
    """Return the head of a request with ``size`` bytes of binary input, and binary output."""
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
    document = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(document) + size}\r\n{extra}"
        f"Inference-Header-Content-Length: {len(document)}\r\n\r\n"
    )
    return head.encode() + document


async def ask(port: int, head: bytes, pieces: int, piece: bytes, pause_s: float, reads: bool = True) -> str:
    """Send ``head`` and the ``pieces``. Return the status of the response, or a word for another end."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MIB)
    except OSError:
        return "not connected"
    try:
        writer.write(head)
        answer = asyncio.ensure_future(reader.readuntil(b"\r\n"))
        for _ in range(pieces):
            if answer.done():
                break
            writer.write(piece)
            await asyncio.wait((answer, asyncio.ensure_future(writer.drain())), return_when=asyncio.FIRST_COMPLETED)
            if pause_s:
                await asyncio.sleep(pause_s)
        if not reads:
            await asyncio.sleep(20)
        status = (await asyncio.wait_for(answer, 60)).split()[1].decode()
        if status == "200":
            fields = (await reader.readuntil(b"\r\n\r\n")).lower()
            found = re.search(rb"content-length: (\d+)", fields)
            remaining = int(found[1]) if found else 0
            while remaining and (data := await reader.read(min(remaining, MIB))):
                remaining -= len(data)
            return "200" if not remaining else "cut off"
        return status
    except (asyncio.TimeoutError, TimeoutError):
        return "no answer"
    except (OSError, asyncio.IncompleteReadError):
        return "ended"
    finally:
        writer.transport.abort()


async def together(count: int, one: Callable[[], Awaitable[str]]) -> Counter[str]:
    return Counter(await asyncio.gather(*(one() for _ in range(count))))


async def slow(server: Server, callers: int) -> Counter[str]:
    return await together(callers, lambda: ask(server.http, infer(16 * MIB), 64, bytes(MIB // 4), 0.5))


async def half(server: Server, callers: int) -> Counter[str]:
    return await together(callers, lambda: ask(server.http, infer(16 * MIB), 32, bytes(MIB // 4), 0))


async def fast(server: Server, callers: int) -> Counter[str]:
    callers = min(callers, 256)
    return await together(callers, lambda: ask(server.http, infer(16 * MIB), 64, bytes(MIB // 4), 0))


async def bombs(server: Server, callers: int) -> Counter[str]:
    size = 60 * MIB
    head = infer(size)
    document = head.partition(b"\r\n\r\n")[2]
    packer = zlib.compressobj(9, wbits=31)
    body = packer.compress(document + bytes(size)) + packer.flush()
    sent = (
        f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nContent-Encoding: gzip\r\n"
        f"Inference-Header-Content-Length: {len(document)}\r\n\r\n"
    ).encode() + body
    return await together(callers, lambda: ask(server.http, sent, 0, b"", 0))


async def unread(server: Server, callers: int) -> Counter[str]:
    return await together(callers, lambda: ask(server.http, infer(8 * MIB), 32, bytes(MIB // 4), 0, reads=False))


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def field(name: str, value: str) -> bytes:
    return b"\x00" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


HEADERS = (
    b"\x83\x86"
    + field(":path", "/inference.GRPCInferenceService/ModelInfer")
    + b"".join(field(*each) for each in ((":authority", "x"), ("content-type", "application/grpc"), ("te", "trailers")))
)
OPENING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0)


async def speak(port: int, streams: int, size: int, sent: int, per_s: float) -> Counter[str]:
    """Open ``streams``, each with a message of ``size`` bytes of which ``sent`` are sent, within the windows."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return Counter(["not connected"])
    window = {0: 65535} | {2 * number + 1: 65535 for number in range(streams)}
    remaining = {2 * number + 1: sent for number in range(streams)}
    ends: Counter[str] = Counter()

    async def listen() -> None:
        initial = 65535
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readexactly(9)
                length, kind, stream = int.from_bytes(head[:3], "big"), head[3], int.from_bytes(head[5:], "big")
                payload = await reader.readexactly(length)
                if kind == 4 and not head[4] & 1:
                    for at in range(0, length, 6):
                        number, value = struct.unpack_from(">HI", payload, at)
                        if number == 4:
                            for each in window:
                                window[each] += (value - initial) if each else 0
                            initial = value
                    writer.write(frame(4, 1, 0))
                elif kind == 8 and stream in window:
                    window[stream] += int.from_bytes(payload, "big")
                elif kind == 1 and remaining.pop(stream, None) is not None:
                    found = re.search(rb"grpc-status.?(\d+)", payload)
                    ends["status " + found[1].decode() if found else "status"] += 1
                elif kind == 7:
                    ends["goaway"] += 1

    listening = asyncio.ensure_future(listen())
    try:
        writer.write(OPENING + b"".join(frame(1, 4, stream, HEADERS) for stream in remaining))
        for stream in remaining:
            writer.write(frame(0, 0, stream, struct.pack(">BI", 0, size)))
            window[stream] -= 5
            window[0] -= 5
        ends_at = time.monotonic() + 30
        while remaining and time.monotonic() < ends_at and not listening.done() and not writer.transport.is_closing():
            moved = 0
            for stream in tuple(remaining):
                piece = min(remaining.get(stream, 0), window[stream], window[0], 16384)
                if piece > 0:
                    writer.write(frame(0, 0, stream, bytes(piece)))
                    remaining[stream] -= piece
                    window[stream] -= piece
                    window[0] -= piece
                    moved += piece
            await writer.drain()
            await asyncio.sleep(moved / per_s if per_s and moved else 0.05 if not moved else 0)
        ends["open"] += len(remaining)
    except OSError:
        ends["ended"] += 1
    finally:
        listening.cancel()
        writer.transport.abort()
    return ends


async def speakers(callers: int, one: Callable[[], Awaitable[Counter[str]]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for each in await asyncio.gather(*(one() for _ in range(callers))):
        total += each
    return total


async def streams(server: Server, callers: int) -> Counter[str]:
    return await speakers(callers // 8, lambda: speak(server.grpc, 8, 16 * MIB, 16 * MIB, MIB / 2))


async def announced(server: Server, callers: int) -> Counter[str]:
    return await speakers(callers // 8, lambda: speak(server.grpc, 8, 16 * MIB, 0, MIB))


async def small(server: Server, callers: int) -> Counter[str]:
    return await speakers(callers // 10, lambda: speak(server.grpc, 100, 200_000, 199_999, 0))


ATTACKS: dict[str, Attack] = {
    each.__name__: each for each in (slow, half, fast, streams, announced, small, bombs, unread)
}


# ---------------------------------------------------------------------- what the others see


class Others:
    """Callers of health, and of 1 MiB, while an attack runs."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.health_ms: list[float] = []
        self.statuses: Counter[str] = Counter()
        self.peak_bytes = 0

    async def health(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.http)
        while True:
            begin = time.perf_counter()
            writer.write(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            self.health_ms.append((time.perf_counter() - begin) * 1000)
            self.peak_bytes = max(self.peak_bytes, self._server.memory("VmRSS"))
            await asyncio.sleep(1 / ASKED_PER_S)

    async def requests(self) -> None:
        while True:
            self.statuses[await ask(self._server.http, infer(MIB), 4, bytes(MIB // 4), 0)] += 1
            await asyncio.sleep(1)


def watch(http: int, pid: int) -> None:
    """Run `Others` until stdin ends, as the main function of another process. Print their figures."""

    async def run() -> None:
        server = Server.__new__(Server)
        server.http = http
        server.pid = pid
        others = Others(server)
        tasks = [asyncio.ensure_future(others.health()), asyncio.ensure_future(others.requests())]
        print("watching", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        failed = [repr(task.exception()) for task in tasks if task.done()]
        print(json.dumps([others.health_ms, others.statuses, others.peak_bytes, failed]))

    asyncio.run(run())


def attack(name: str, arguments: argparse.Namespace, repository: str) -> bool:
    server = Server(arguments, repository)
    reading = asyncio.to_thread(server.drain)

    async def run() -> Counter[str]:
        log = asyncio.ensure_future(reading)
        await asyncio.sleep(0.5)
        await ask(server.http, infer(MIB), 4, bytes(MIB // 4), 0)
        found = await ATTACKS[name](server, arguments.callers)
        if server.process.poll() is None:
            watcher.stdin.close()  # type: ignore[union-attr]
        else:
            watcher.kill()
        del log
        return found

    rest = server.memory("VmRSS")
    with subprocess.Popen(
        [sys.executable, __file__, "--watch", str(server.http), str(server.process.pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()

        async def whole() -> tuple[Counter[str], str]:
            found = await run()
            text = await asyncio.to_thread(watcher.stdout.read)  # type: ignore[union-attr]
            server.process.terminate()
            return found, text

        found, text = asyncio.run(whole())
    is_alive = server.process.wait() == 0
    if not text:
        print(f"{name:10} THE SERVER ENDED with {server.process.returncode}\n", "".join(server.log[-20:]))
        return False
    health_ms, statuses, peak, failed = json.loads(text)
    health_ms.sort()
    p50, p99 = (health_ms[int(len(health_ms) * part)] for part in (0.5, 0.99))
    over = (peak - rest) / server.budget
    is_good = is_alive and over <= OVER and p99 <= P99_MS and not failed
    print(
        f"{name:10} {'ok ' if is_good else 'BAD'} memory {over:.2f} of the budget ({(peak - rest) >> 20} MiB), health "
        f"p50 {p50:.1f} p99 {p99:.1f} max {health_ms[-1]:.0f} ms of {len(health_ms)}; attackers {dict(found)}; "
        f"others {statuses} {failed or ''}",
        flush=True,
    )
    if errors := [line for line in server.log if "Traceback" in line or line.startswith("E")]:
        print("    log:", *errors[:5])
    return is_good


def main() -> int:
    if sys.argv[1:2] == ["--watch"]:
        watch(int(sys.argv[2]), int(sys.argv[3]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=int, default=0)
    parser.add_argument("--callers", type=int, default=1000)
    parser.add_argument("--only", default=",".join(ATTACKS))
    parser.add_argument("--ulimit", type=int, default=0)
    parser.add_argument("--cgroup", default="")
    parser.add_argument("--http-server", default="native")
    arguments = parser.parse_args()
    if not (arguments.budget or arguments.ulimit or arguments.cgroup):
        arguments.budget = 1 << 30
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory() as repository:
        Path(repository, "echo/1").mkdir(parents=True)
        Path(repository, "echo/config.pbtxt").write_text(CONFIG)
        return int(sum(not attack(name, arguments, repository) for name in arguments.only.split(",")) > 0)


if __name__ == "__main__":
    sys.exit(main())
