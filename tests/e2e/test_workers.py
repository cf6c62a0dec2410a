"""Whole servers on one port, under a real supervisor: right totals, one shutdown, and no worker dies with another."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.conftest import wait_until
from tests.e2e.lines import MOST, Line, Lines, accepted_sockets, is_alive, processes_of, sockets_of

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

TITLE = "worker"
SUCCESS = "nv_inference_request_success"
STATEFUL = """
backend: "identity"
input { name: "IN" data_type: TYPE_FP32 dims: [1] } output { name: "OUT" data_type: TYPE_FP32 dims: [1] }
sequence_batching { }
"""


@pytest.fixture
def late(gate: Gate, add_model: Callable[..., Path]) -> str:
    """The config of the model ``late``, which was not there when the server started."""
    add_model(gate.path.parents[1], "late")
    io = {"data_type": "TYPE_FP32", "dims": [-1]}
    return json.dumps({"backend": "identity", "input": [{"name": "IN", **io}], "output": [{"name": "OUT", **io}]})


@pytest.fixture(scope="module")
def server(keep_serving: Callable[..., Headrace], gate: Gate, gated: Mapping[str, str]) -> Headrace:
    words = (f"--model-repository={gate.path.parents[1]}", "--model-control-mode=explicit", "--load-model=*")
    return serving(keep_serving(*words, "--workers=2", environ=gated))


def serving(server: Headrace) -> Headrace:
    """``server``, when both workers serve."""
    server.wait_for_line("2 workers serve")
    assert len(processes_of(server, TITLE)) == 2
    for service in ("GRPCInferenceService", "HTTPService"):
        assert server.log.count(f"Started {service} at") == 2
    return server


class Tally:
    """The number of requests that ``server`` has answered for the model ``echo``, counted by the tests of this
    module."""

    def __init__(self, server: Headrace) -> None:
        self._server, self._count = server, 0

    def ask(self, line: Line) -> None:
        line.ask("echo")
        assert line.answer() == [1.5]
        self.add(1)

    def add(self, count: int) -> None:
        self._count += count

    def wait_until_shown(self) -> None:
        """Wait until the metrics page has these counts. A slow worker keeps its last ones."""
        self._server.wait_until_metric(SUCCESS, "echo", self._count)


@pytest.fixture(scope="module")
def tally(server: Headrace) -> Tally:
    return Tally(server)


@pytest.fixture
def lines(server: Headrace) -> Iterator[Lines]:
    with contextlib.closing(Lines(server, TITLE)) as opened:
        yield opened


def test_the_stock_clients_reach_both_and_the_page_has_the_total(server: Headrace, lines: Lines, tally: Tally) -> None:
    for count, line in enumerate(lines.one_each(), 1):
        for _ in range(count):
            tally.ask(line)
    values = np.array([1.5, 2.5], np.float32)
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        tensor = httpclient.InferInput("IN", [2], "FP32")
        tensor.set_data_from_numpy(values)
        assert np.array_equal(client.infer("echo", [tensor]).as_numpy("OUT"), values)
        assert client.is_server_ready()
    tally.add(1 + ask_both_over_grpc(server, values))
    tally.wait_until_shown()


def ask_both_over_grpc(server: Headrace, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> int:
    """Infer once on each of as many connections as it takes for both workers to have one; return their number."""
    unmet = set(processes_of(server, TITLE))
    with contextlib.ExitStack() as clients:
        for count in range(1, MOST + 1):
            own = [("grpc.use_local_subchannel_pool", 1)]  # or all clients of a process have one connection
            client = grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}", channel_args=own)
            clients.enter_context(client)
            tensor = grpcclient.InferInput("IN", [2], "FP32")
            tensor.set_data_from_numpy(values)
            assert np.array_equal(client.infer("echo", [tensor]).as_numpy("OUT"), values)
            unmet = {pid for pid in unmet if not sockets_of(pid) & accepted_sockets(server.grpc)}
            if not unmet:
                return count
    raise AssertionError(f"{MOST} connections, and none to {unmet}")


def test_one_that_is_killed_loses_its_own_connections_and_is_replaced(
    server: Headrace, lines: Lines, tally: Tally
) -> None:
    doomed, other = lines.one_each()
    tally.wait_until_shown()  # its counts since then would be lost with it
    os.kill(doomed.owner, signal.SIGKILL)
    wait_until(lambda: not is_alive(doomed.owner), "it is dead")
    with pytest.raises(ConnectionError):
        tally.ask(doomed)
    tally.ask(other)
    server.wait_for_line("worker 0 was killed by SIGKILL; its connections are lost")
    tally.wait_until_shown()
    server.wait_for_line("worker 0 has been restarted")
    for line in lines.one_each():
        tally.ask(line)
    tally.wait_until_shown()


def test_a_stopped_worker_delays_no_other_and_keeps_its_last_counts(
    server: Headrace, lines: Lines, tally: Tally
) -> None:
    stopped, other = lines.one_each()
    tally.wait_until_shown()
    os.kill(stopped.owner, signal.SIGSTOP)
    try:
        stopped.ask("echo")
        for _ in range(20):
            tally.ask(other)
        tally.wait_until_shown()
        server.wait_for_line("worker 0 does not answer with its metrics; its last ones count")
    finally:
        os.kill(stopped.owner, signal.SIGCONT)
    assert stopped.answer() == [1.5]
    tally.add(1)
    tally.wait_until_shown()


def test_a_load_by_name_reaches_all_workers_and_replacements(server: Headrace, lines: Lines, late: str) -> None:
    def shown(line: Line) -> tuple[int, str]:
        status, body = line.get("/v2/models/late/config")
        return status, body.get("default_model_filename", "")

    both = lines.one_each()
    with httpclient.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        for name in ("a", "b"):
            client.load_model("late", config=json.dumps(json.loads(late) | {"default_model_filename": name}))
            assert [shown(line) for line in both] == [(200, name)] * 2
        with pytest.raises(InferenceServerException, match="nowhere"):
            client.load_model("late", config=json.dumps(json.loads(late) | {"backend": "nowhere"}))
        assert [shown(line) for line in both] == [(200, "b")] * 2
        client.unload_model("echo_too")
    os.kill(both[1].owner, signal.SIGKILL)
    server.wait_for_line("worker 1 has been restarted")
    both = lines.one_each()
    assert [shown(line) for line in both] == [(200, "b")] * 2
    assert 200 not in [line.get("/v2/models/echo_too/ready")[0] for line in both]
    with grpcclient.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        client.load_model("echo_too")
        client.unload_model("late")
    assert [line.get("/v2/models/echo_too/ready")[0] for line in both] == [200, 200]
    assert 200 not in [shown(line)[0] for line in both]


def test_a_port_that_another_server_has_is_refused(
    server: Headrace, run_headrace: Callable[..., Headrace], gate: Gate, gated: Mapping[str, str]
) -> None:
    """Although its workers share it."""
    words = [f"--model-repository={gate.path.parents[1]}", "--workers=2", f"--http-port={server.http}"]
    other = run_headrace(*words, environ=gated)
    assert other.finish() == 1
    assert f"failed to listen for HTTPService on 127.0.0.1:{server.http}: the port is in use" in other.log
    assert "stopping before" not in other.log


def test_a_signal_before_all_serve_ends_the_started_workers(
    run_headrace: Callable[..., Headrace], gate: Gate, gated: Mapping[str, str]
) -> None:
    server = run_headrace(f"--model-repository={gate.path.parents[1]}", "--workers=2", environ=gated)
    server.wait_for_line("Started HTTPService at")
    pids = [server.process.pid, *processes_of(server, TITLE)]
    server.process.send_signal(signal.SIGTERM)
    assert server.finish() == 0
    assert "stopping before all workers serve" in server.log
    assert [pid for pid in pids if is_alive(pid)] == []


def test_requests_of_all_workers_are_answered_when_the_server_stops(
    run_headrace: Callable[..., Headrace], gate: Gate, gated: Mapping[str, str]
) -> None:
    words = (f"--model-repository={gate.path.parents[1]}", "--workers=2", "--grpc-server=grpcio")
    server = serving(run_headrace(*words, environ=gated).wait_until_ready())
    with contextlib.closing(Lines(server, TITLE)) as lines:
        open_lines = lines.one_each()
        gate.close()
        for line in open_lines:
            (gate.path / "running").unlink(missing_ok=True)
            line.ask("slow")
            gate.wait_until_running()
        server.process.send_signal(signal.SIGTERM)
        for pid in processes_of(server, TITLE):
            os.kill(pid, signal.SIGTERM)  # as a program that stops a process group does
        server.wait_for_line("signal SIGTERM: stopping")
        gate.open()
        assert [line.answer() for line in open_lines] == [[1.5], [1.5]]
    assert server.finish() == 0


def test_none_outlives_a_supervisor_that_is_killed(
    run_headrace: Callable[..., Headrace], gate: Gate, gated: Mapping[str, str]
) -> None:
    words = (f"--model-repository={gate.path.parents[1]}", "--workers=2", "--http-server=hypercorn")
    server = serving(run_headrace(*words, environ=gated).wait_until_ready())
    with contextlib.closing(Lines(server, TITLE)) as lines:
        pids = [line.owner for line in lines.one_each()]
    server.process.kill()
    for pid in pids:
        wait_until(lambda pid=pid: not is_alive(pid), f"process {pid} has ended")  # type: ignore[misc]


def test_a_model_with_sequences_is_refused_by_name_and_the_server_does_not_start(
    run_headrace: Callable[..., Headrace], add_model: Callable[..., Path], tmp_path: Path
) -> None:
    add_model(tmp_path, "turns", STATEFUL)
    server = run_headrace(f"--model-repository={tmp_path}", "--workers=2")
    assert server.finish() == 1
    assert "model 'turns' cannot be served with --workers=2: its scheduler 'sequence_batching'" in server.log
    assert "error: creating server: Internal - worker 0 exited with status 1 while it was starting" in server.log
    assert "Traceback" not in server.log


def test_a_profile_is_enforced_once_and_with_the_metrics_page(
    run_headrace: Callable[..., Headrace], tmp_path: Path
) -> None:
    words = ("--workers=2", "--security-profile=public", "--http-address=0.0.0.0", "--metrics-address=0.0.0.0")
    server = run_headrace(f"--model-repository={tmp_path}", *words)
    assert server.finish() == 1
    assert "creating server: Invalid argument - --security-profile=public starts no server that is open" in server.log
    assert server.log.count(": no TLS: every machine that reaches the address; give --http-use-ssl=true") == 1
    assert ": metrics: anybody" in server.log
