"""One memory budget of a few MiB: what callers can make a server hold, and that others are answered meanwhile."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.grpc import service_pb2, service_pb2_grpc

if TYPE_CHECKING:
    from tests.conftest import Headrace

MIB = 1 << 20
BUDGET = 16 * MIB
CONFIG = """backend: "identity" max_batch_size: 0
input { name: "IN" data_type: TYPE_UINT8 dims: [ -1 ] } output { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    (folder / "echo/1").mkdir(parents=True)
    (folder / "echo/config.pbtxt").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, keep_serving: Callable[..., Headrace]) -> Headrace:
    words = (f"--model-repository={repository}", f"--memory-budget={BUDGET}", "--memory-wait-secs=2")
    return keep_serving(*words)


def head(size: int, extra: str = "", length: int | None = None) -> bytes:
    """Return the head and the JSON of a request with ``size`` bytes in binary."""
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
    document = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    total = len(document) + size if length is None else length
    text = (
        f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {total}\r\n{extra}"
        f"Inference-Header-Content-Length: {len(document)}\r\n\r\n"
    )
    return text.encode() + (document if length is None else b"")


HEADERS = b"\x83\x86" + b"".join(
    b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value
    for name, value in (
        (b":path", b"/inference.GRPCInferenceService/ModelInfer"),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def begun(server: Headrace, size: int, sent: int) -> socket.socket:
    caller = socket.create_connection(("127.0.0.1", server.http), 30)
    caller.sendall(head(size) + bytes(sent))
    return caller


def answer(caller: socket.socket) -> http.client.HTTPResponse:
    response = http.client.HTTPResponse(caller)
    response.begin()
    return response


def page(server: Headrace) -> str:
    return server.get("/metrics", server.ports["Metrics Service"])[1].decode()


def refused(server: Headrace) -> float:
    match = re.search(r"^headrace_memory_refused_total (\S+)", page(server), re.MULTILINE)
    assert match
    return float(match[1])


def held(server: Headrace, kind: str = "connections") -> float:
    match = re.search(rf'headrace_memory_held_bytes{{kind="{kind}"}} ([0-9.e+]+)', page(server))
    assert match
    return float(match[1])


def test_the_budget_is_logged_at_start_and_measured(server: Headrace) -> None:
    assert "Memory budget of requests, responses and the response cache: 16 MiB, as --memory-budget says" in server.log
    metrics = page(server)
    assert f"headrace_memory_budget_bytes {BUDGET}\n" in metrics
    assert "headrace_memory_waiting 0\n" in metrics


def test_more_clients_than_fit_are_all_answered(server: Headrace) -> None:
    """24 clients with 1 MiB each, at once over each protocol: more than the budget. They wait for each other."""
    value = np.arange(MIB, dtype=np.uint8)

    def by_http(_: int) -> bool:
        with http_client.InferenceServerClient(f"127.0.0.1:{server.http}", network_timeout=30) as client:
            tensor = http_client.InferInput("IN", [MIB], "UINT8")
            tensor.set_data_from_numpy(value)
            return bool((client.infer("echo", [tensor]).as_numpy("OUT") == value).all())

    def by_grpc(_: int) -> bool:
        with grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
            tensor = grpc_client.InferInput("IN", [MIB], "UINT8")
            tensor.set_data_from_numpy(value)
            return bool((client.infer("echo", [tensor]).as_numpy("OUT") == value).all())

    for ask in (by_http, by_grpc):
        with ThreadPoolExecutor(24) as callers:
            assert all(callers.map(ask, range(24)))


def test_incomplete_bodies_are_refused_and_affect_no_client(server: Headrace, wait_until: Callable[..., None]) -> None:
    """All connections half way are no deadlock: requests that fit wait for the rest of their bodies, the others are
    refused."""
    refused_before = refused(server)
    callers = [begun(server, 6 * MIB, 4 * MIB) for _ in range(8)]
    try:
        wait_until(lambda: refused(server) >= refused_before + 5, "refusals", 20)
        begin = time.perf_counter()
        assert server.get("/v2/health/live")[0] == 200
        assert time.perf_counter() - begin < 1
        served = 0
        for caller in callers:
            try:
                caller.sendall(bytes(2 * MIB))
                response = answer(caller)
            except OSError:
                continue  # reset behind its refusal, which was not read
            if response.status == 200:
                served += 1
                assert len(response.read()) > 6 * MIB
            else:
                assert response.status == 503
                assert response.headers["Retry-After"] == "1"
                assert b"--memory-budget" in response.read()
        assert served >= 1
    finally:
        for caller in callers:
            caller.close()
    wait_until(lambda: held(server) == 0, "nothing is held", 20)
    assert "the memory budget of 16 MiB is used up" in server.log


def test_a_body_that_can_never_fit_is_refused_at_once(server: Headrace) -> None:
    size = BUDGET + 1
    with begun(server, size, 0) as caller:
        response = answer(caller)
        assert response.status == 400
        assert re.search(rb"of \d+ bytes exceeds the 16777216 bytes .* --memory-budget", response.read())
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}", [("grpc.max_send_message_length", -1)]) as channel:
        request = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(size)])
        with pytest.raises(grpc.RpcError) as failure:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=20)
    assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--memory-budget" in str(failure.value.details())


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_a_bomb_stops_at_the_budget(server: Headrace, protocol: str, wait_until: Callable[..., None]) -> None:
    size = 32 * MIB
    if protocol == "http":
        whole = head(size).partition(b"\r\n\r\n")[2]
        body = gzip.compress(whole + bytes(size), 1)
        with socket.create_connection(("127.0.0.1", server.http), 30) as caller:
            extra = f"Content-Encoding: gzip\r\nContent-Length: {len(body)}\r\n"
            extra += f"Inference-Header-Content-Length: {len(whole)}\r\n\r\n"
            caller.sendall(f"POST /v2/models/echo/infer HTTP/1.1\r\nHost: x\r\n{extra}".encode() + body)
            response = answer(caller)
            assert response.status == 503
            assert b"no memory to decompress" in response.read()
    else:
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc}", [("grpc.max_send_message_length", -1)]) as channel:
            request = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[bytes(size)])
            with pytest.raises(grpc.RpcError) as failure:
                service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(
                    request, timeout=20, compression=grpc.Compression.Gzip
                )
        assert failure.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "no memory to decompress" in str(failure.value.details())
    wait_until(lambda: held(server, "decompressed") == 0, "nothing is held", 20)


def test_streams_that_announce_take_nothing_from_others(server: Headrace) -> None:
    """64 messages of 4 MiB, of which five bytes arrive: 256 MiB."""
    with socket.create_connection(("127.0.0.1", server.grpc), 30) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        for stream in range(1, 129, 2):
            peer.sendall(frame(1, 4, stream, HEADERS) + frame(0, 0, stream, struct.pack(">BI", 0, 4 * MIB)))
        with begun(server, 6 * MIB, 6 * MIB) as caller:
            assert answer(caller).status == 200


def test_unread_answers_are_dropped_for_others(server: Headrace, wait_until: Callable[..., None]) -> None:
    callers = [begun(server, 5 * MIB, 5 * MIB) for _ in range(6)]
    try:
        with begun(server, 5 * MIB, 5 * MIB) as reader:
            response = answer(reader)
            assert response.status in (200, 503)
            response.read()
        assert held(server) <= BUDGET
    finally:
        for caller in callers:
            caller.close()
    wait_until(lambda: held(server) == 0, "nothing is held", 20)


def test_unread_answers_count_whole_and_keep_their_content(server: Headrace, wait_until: Callable[..., None]) -> None:
    """The part of an answer that the sockets take stays counted, and released memory of others is not theirs."""
    size = 5 * MIB
    contents = [np.random.default_rng(seed).bytes(size) for seed in range(2)]
    with begun(server, size, 0) as first, begun(server, size, 0) as second:
        for caller, content in zip((first, second), contents, strict=True):
            caller.sendall(content)
            select.select([caller], [], [], 20)
        wait_until(lambda: held(server) >= 2 * size, "both count whole", 20)
        for _ in range(3):
            with begun(server, 2 * MIB, 2 * MIB) as other:
                assert answer(other).status == 200
        for caller, content in zip((first, second), contents, strict=True):
            assert answer(caller).read().endswith(content)
    wait_until(lambda: held(server) == 0, "nothing is held", 20)


def test_small_messages_that_are_not_complete_stay_within_the_budget(server: Headrace) -> None:
    """200 messages of 150 KB, each without its last byte: some are refused, and the ones that fit arrive."""
    before = refused(server)
    size = 150_000
    with socket.create_connection(("127.0.0.1", server.grpc), 30) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b""))
        most = 0.0
        for stream in range(1, 401, 2):
            message = struct.pack(">BI", 0, size) + bytes(size - 1)
            peer.sendall(frame(1, 4, stream, HEADERS))
            for at in range(0, len(message), 16384):
                peer.sendall(frame(0, 0, stream, message[at : at + 16384]))
            if select.select([peer], [], [], 0)[0]:
                peer.recv(1 << 16)
            if stream % 40 == 1:
                most = max(most, held(server))
        assert 3 / 4 * BUDGET <= most <= BUDGET
        assert refused(server) > before + 50


@pytest.fixture
def limited(repository: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server under ``ulimit -v``, with a budget that is far too large for it, and its HTTP port."""
    words = [f"--model-repository={repository}", f"--memory-budget={1 << 40}", "--allow-grpc=false", "--http-port=0"]
    headrace = str(Path(sys.executable).with_name("headrace"))
    limit = f'ulimit -v {1200 * 1024}; exec "$@"'
    command = ["sh", "-c", limit, "sh", headrace, "serve", *words, "--allow-metrics=false"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if match := re.search(r"Started HTTPService at \S+:(\d+)", line):
                yield process, int(match[1])
                break
        process.terminate()
        process.stderr.read()


def test_a_server_that_gets_no_memory_refuses_and_lives(limited: tuple[subprocess.Popen[str], int]) -> None:
    """The operating system refuses before the budget does: `MemoryError` is an answer."""
    process, port = limited
    callers = [socket.create_connection(("127.0.0.1", port), 30) for _ in range(30)]
    for caller in callers:
        caller.sendall(head(60 * MIB) + bytes(2 * MIB))
    refused, _, _ = select.select(callers, [], [], 30)  # the others have their memory, and wait for the rest
    assert {answer(caller).status for caller in refused} == {503}
    for caller in callers:
        caller.close()
    with socket.create_connection(("127.0.0.1", port), 30) as caller:
        caller.sendall(head(MIB) + bytes(MIB))
        assert answer(caller).status == 200
    assert process.poll() is None
