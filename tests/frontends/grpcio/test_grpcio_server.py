"""grpcio under a client that speaks HTTP/2 frame by frame, and what is imported."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hyperframe import frame as frames

if TYPE_CHECKING:
    from tests.conftest import Headrace
    from tests.core.headrace_grpc.conftest import Peer

UNAVAILABLE = 14
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
Connect = Callable[..., "Peer"]
Serve = Callable[..., "Headrace"]


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_stop_does_not_wait_for_those_who_do_not_read(serve_native: Serve, connect: Connect, method: str) -> None:
    server = serve_native("--exit-timeout-secs=30", "--grpc-server=grpcio")
    peer = connect(server.grpc, {4: 0})
    peer.credits = False
    peer.call(1, method, peer.infer(content=bytes(4000)))
    peer.until(frames.HeadersFrame, 1)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert time.monotonic() - began < 20


def test_a_stop_says_farewell_to_those_who_ask_for_nothing(serve_native: Serve, connect: Connect) -> None:
    """A stream between two requests, and one that has had none."""
    server = serve_native("--exit-timeout-secs=30", "--grpc-server=grpcio")
    peer = connect(server.grpc)
    peer.start(1, "ModelStreamInfer").send(peer.data(1, peer.framed(peer.infer())))
    peer.until(frames.DataFrame, 1)
    peer.start(3, "ModelStreamInfer")
    peer.settle()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert [peer.answer(stream).status for stream in (1, 3)] == [UNAVAILABLE] * 2
    assert {peer.answers[stream].trailers["grpc-message"] for stream in (1, 3)} == {SHUTTING_DOWN}
    assert server.process.wait(60) == 0
    assert time.monotonic() - began < 20


def test_grpc_is_imported_when_the_host_starts_and_not_before(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from headrace.server import Server\n"
        f"with Server('{tmp_path}', grpc_port=0, http_port=0, metrics_port=0, grpc_server='grpcio') as server:\n"
        "    before = 'grpc' in sys.modules\n"
        "    asyncio.run_coroutine_threadsafe(server.start_frontends(), server.loop).result(20)\n"
        "    print(sorted(frontend.name for frontend in server.frontends), before, 'grpc' in sys.modules)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip() == "['grpcio', 'http', 'metrics'] False True"
