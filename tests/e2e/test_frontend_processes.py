"""Frontend processes under a real server: one that dies, stops or must end takes nobody else's connections along."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import wait_until
from tests.e2e.lines import Line, Lines, is_alive, processes_of

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

TITLE = "frontend process"
MIB = 1 << 20
#: More than the buffers of both ends, of client, server and system, can hold.
MOST_SENT = 64 * MIB
#: What makes a server close the connection.
GARBAGE = (
    b"\0" * 4096 + b"\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST /v2/models/echo/infer HTTP/1.1\r\nContent-Length: x\r\n\r\n",
)


def frontends(server: Headrace) -> list[int]:
    return processes_of(server, TITLE)


@pytest.fixture
def server(serve: Callable[..., Headrace], gate: Gate, gated: Mapping[str, str]) -> Iterator[Headrace]:
    gate.open()
    yield serve(f"--model-repository={gate.path.parents[1]}", "--frontend-processes=2", environ=gated)
    gate.open()


@pytest.fixture
def lines(server: Headrace) -> Iterator[Lines]:
    with contextlib.closing(Lines(server, TITLE)) as opened:
        yield opened


def test_one_that_is_killed_loses_its_own_connections_and_is_replaced(
    server: Headrace, lines: Lines, gate: Gate
) -> None:
    doomed, other = lines.one_each()
    behind = lines.to(doomed.owner)
    gate.close()
    other.ask("slow")
    gate.wait_until_running()
    doomed.ask("slow")
    behind.ask("slow")
    server.wait_until_pending("slow", 2)
    os.kill(doomed.owner, signal.SIGKILL)
    for line in (doomed, behind):
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            line.answer()
    server.wait_until_pending("slow", 0)  # nobody waits for them any more
    gate.open()
    assert other.answer() == [1.5]
    server.wait_for_line("frontend process 0 was killed by SIGKILL; its connections are lost")
    server.wait_for_line("frontend process 0 has been restarted")
    for line in lines.one_each():
        line.ask("echo")
        assert line.answer() == [1.5]
    assert server.metric("nv_inference_request_success", "slow") == 1


def test_what_replaces_them_takes_no_more_descriptors_threads_nor_memory(server: Headrace) -> None:
    """With ``HEADRACE_RESTARTS=50`` in the environment, of so many; each but the first waits up to four seconds."""

    def kill_one() -> None:
        os.kill(frontends(server)[1], signal.SIGKILL)
        server.wait_for_line("frontend process 1 has been restarted")

    def count(what: str) -> int:
        return len(list(Path(f"/proc/{server.process.pid}/{what}").iterdir()))

    kill_one()
    descriptors, threads, before = count("fd"), count("task"), server.rss_bytes
    for _ in range(int(os.environ.get("HEADRACE_RESTARTS", "2"))):
        kill_one()
    wait_until(lambda: count("fd") <= descriptors, f"no more than {descriptors} descriptors are open")
    wait_until(lambda: count("task") <= threads, f"no more than {threads} threads run")
    assert server.rss_bytes < before + 16 * MIB
    assert server.get("/v2/health/ready")[0] == 200


def test_one_that_is_stopped_holds_up_nobody_elses_connections(lines: Lines) -> None:
    stopped, other = lines.one_each()
    os.kill(stopped.owner, signal.SIGSTOP)
    try:
        stopped.ask("echo")
        for _ in range(20):
            other.ask("echo")
            assert other.answer() == [1.5]
    finally:
        os.kill(stopped.owner, signal.SIGCONT)
    assert stopped.answer() == [1.5]


def test_what_is_answered_to_one_that_is_stopped_waits_for_it_and_is_no_more_than_it_had_asked(
    server: Headrace, lines: Lines, gate: Gate
) -> None:
    stopped, other = lines.one_each()
    asked = [stopped, *(lines.to(stopped.owner) for _ in range(7))]
    gate.close()
    for line in asked:
        line.ask("slow")
    server.wait_until_pending("slow", len(asked) - 1)
    os.kill(stopped.owner, signal.SIGSTOP)
    try:
        before = server.rss_bytes
        gate.open()
        server.wait_until_pending("slow", 0)  # answered, by all that the engine knows
        for _ in range(50):
            other.ask("echo")
            assert other.answer() == [1.5]
        assert server.rss_bytes < before + 16 * MIB
    finally:
        os.kill(stopped.owner, signal.SIGCONT)
    assert [line.answer() for line in asked] == [[1.5]] * len(asked)


def test_one_that_is_flooded_takes_its_share_of_memory_and_holds_up_nobody_elses_connections(
    server: Headrace, lines: Lines
) -> None:
    flooded, other = lines.one_each()
    resident = [*frontends(server), server.process.pid]
    before = [rss_bytes(pid) for pid in resident]
    sent = send_without_reading(flooded)
    for garbage in GARBAGE:
        line = lines.to(flooded.owner)
        assert line.http.sock is not None
        line.http.sock.sendall(garbage)
        while line.http.sock.recv(65536):  # until it is closed
            pass
    for _ in range(50):
        other.ask("echo")
        assert other.answer() == [1.5]
    assert sent < MOST_SENT, "a client that reads nothing was read to the end"
    for pid, least in zip(resident, before, strict=True):
        assert rss_bytes(pid) < least + 64 * MIB


def send_without_reading(line: Line) -> int:
    """Ask again and again until nothing more is taken, or `MOST_SENT`; returns how many bytes were sent."""
    end = line.http.sock
    assert end is not None
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    tensor = {"name": "IN", "datatype": "FP32", "shape": [2000], "data": [1.5] * 2000}
    body = json.dumps({"inputs": [tensor]}, separators=(",", ":")).encode()
    request = b"POST /v2/models/echo/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    end.setblocking(False)
    sent = 0
    while sent < MOST_SENT and select.select([], [end], [], 1)[1]:
        begin = sent % len(request)
        sent += end.send(request[begin:])
    return sent


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_they_have_is_answered_when_the_server_stops(server: Headrace, lines: Lines, gate: Gate) -> None:
    asked = lines.one_each()
    gate.close()
    for line in asked:
        line.ask("slow")
    gate.wait_until_running()
    server.wait_until_pending("slow", 1)
    server.process.send_signal(signal.SIGTERM)
    for pid in frontends(server):
        os.kill(pid, signal.SIGTERM)  # as whoever stops a group of processes does
    server.wait_for_line("signal SIGTERM: stopping")
    gate.open()
    assert [line.answer() for line in asked] == [[1.5], [1.5]]
    assert server.finish() == 0


def test_none_outlives_a_server_that_is_killed(
    run_headrace: Callable[..., Headrace], gate: Gate, gated: Mapping[str, str]
) -> None:
    server = run_headrace(f"--model-repository={gate.path.parents[1]}", "--frontend-processes=2", environ=gated)
    pids = frontends(server.wait_until_ready())
    assert len(pids) == 2
    server.process.kill()
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} has ended")  # type: ignore[misc]


def test_what_cannot_be_had_with_them_is_refused_by_both_names(
    run_headrace: Callable[..., Headrace], gate: Gate, gated: Mapping[str, str]
) -> None:
    server = run_headrace(
        f"--model-repository={gate.path.parents[1]}", "--frontend-processes=2", "--grpc-server=grpcio", environ=gated
    )
    assert server.finish() == 1
    assert "--frontend-processes=2 and --grpc-server=grpcio are refused together" in server.log


def test_a_port_that_another_server_has_is_refused(
    server: Headrace, run_headrace: Callable[..., Headrace], gate: Gate, gated: Mapping[str, str]
) -> None:
    """Although both let processes of their own share it."""
    words = [f"--model-repository={gate.path.parents[1]}", "--frontend-processes=2", f"--http-port={server.http}"]
    other = run_headrace(*words, environ=gated)
    assert other.finish() == 1
    assert f"failed to listen for HTTP on 127.0.0.1:{server.http}: the port is in use" in other.log
