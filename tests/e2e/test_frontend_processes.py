"""Frontend processes under a real server: one that dies, stops or must end takes nobody else's connections along."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.conftest import wait_until
from tests.e2e.lines import Lines, is_alive, processes_of

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

TITLE = "frontend process"


def frontends(server: Headrace) -> list[int]:
    return processes_of(server, TITLE)


@pytest.fixture(scope="module")
def gate(
    tmp_path_factory: pytest.TempPathFactory,
    add_model: Callable[..., Path],
    make_gate: Callable[[Path], Gate],
    echo: str,
) -> Gate:
    """Of the model ``slow``; ``echo`` lies beside it."""
    root = tmp_path_factory.mktemp("models")
    add_model(root, "echo")
    return make_gate(add_model(root, "slow", f'backend: "gated"{echo}'))


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


def test_what_replaces_them_takes_no_more_descriptors_nor_memory(server: Headrace) -> None:
    def kill_one() -> None:
        os.kill(frontends(server)[1], signal.SIGKILL)
        server.wait_for_line("frontend process 1 has been restarted")

    def descriptors() -> int:
        return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))

    kill_one()
    before = descriptors()
    for _ in range(2):
        kill_one()
    wait_until(lambda: descriptors() <= before, f"no more than {before} descriptors are open")
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
