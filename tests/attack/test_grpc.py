"""Extreme use of a gRPC port by stock clients, and hostile calls and messages."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as triton

if TYPE_CHECKING:
    from tests.conftest import Headrace

SERVICE = "/inference.GRPCInferenceService/"
SECONDS = 3.0
Frame = Callable[..., AbstractContextManager[None]]
#: What thousands of calls at a time leave with grpc's core does not come back, nor from bare grpcio (docs/hosts.md).
CORE_KEPT_BYTES = 128 << 20


def request(size: int = 2, model: str = "echo") -> triton.ModelInferRequest:
    content = np.arange(size, dtype=np.float32) if model == "echo" else np.zeros(size, np.uint8)
    made = triton.ModelInferRequest(model_name=model, raw_input_contents=[content.tobytes()])
    made.inputs.add(name="IN", datatype="FP32" if model == "echo" else "UINT8", shape=[size])
    return made


def model_infer(channel: grpc.Channel) -> Any:
    return channel.unary_unary(
        f"{SERVICE}ModelInfer", triton.ModelInferRequest.SerializeToString, triton.ModelInferResponse.FromString
    )


def test_a_client_that_cancels_as_fast_as_it_can(attacked: Headrace, under_attack: Frame) -> None:
    """Other calls of the same channel all succeed: no GOAWAY, though nothing is answered for thousands of calls."""

    def cancel(call: Any, end: float) -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # it is on another machine
        count = 0
        while time.monotonic() < end:
            for _ in range(20):
                call.future(request(), timeout=20).cancel()
            count += 20
            threading.Event().wait(0.003)  # the client's own threads need the interpreter, too
        return count

    def ask(call: Any, end: float) -> int:
        count = 0
        while time.monotonic() < end:
            asked = request(3)
            assert call(asked, timeout=20).raw_output_contents == asked.raw_input_contents
            count += 1
        return count

    def attack(seconds: float) -> None:
        end = time.monotonic() + seconds
        with grpc.insecure_channel(f"127.0.0.1:{attacked.grpc}") as channel, ThreadPoolExecutor(8) as pool:
            call = model_infer(channel)
            asking = [pool.submit(ask, call, end) for _ in range(2)]
            cancelling = [pool.submit(cancel, call, end) for _ in range(6)]
            assert sum(each.result() for each in cancelling) > 50 * seconds  # thousands on a quiet machine
            assert all(each.result() for each in asking)

    attack(1.0)  # what an allocator keeps of the first time it keeps once
    allowed = {"kept_bytes": CORE_KEPT_BYTES} if "--grpc-server=grpcio" in str(attacked.process.args) else {}
    with under_attack(attacked, **allowed):
        attack(SECONDS)


def test_a_stream_of_answers_that_nobody_reads(attacked: Headrace) -> None:
    """A thousand requests of a megabyte each, none of whose answers is read: 1 GB, of which the server takes 64 MB."""
    unread(attacked)


def test_a_stream_of_answers_that_nobody_reads_disturbs_nobody(
    attacked_natively: Headrace, under_attack: Frame
) -> None:
    unread(attacked_natively)  # what an allocator keeps of the first time it keeps once
    with under_attack(attacked_natively):
        unread(attacked_natively)


def unread(server: Headrace) -> None:
    asked = triton.ModelInferRequest(model_name="huge", raw_input_contents=[bytes(1 << 20)])
    asked.inputs.add(name="IN", datatype="UINT8", shape=[1 << 20])
    done, taken = threading.Event(), 0

    def requests() -> Iterator[triton.ModelInferRequest]:
        nonlocal taken
        while taken < 1024 and not done.is_set():
            taken += 1
            yield asked

    options = [("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0)]
    before = server.rss_bytes
    server.forget_peak()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}", options) as channel:
        call: Any = channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            triton.ModelInferRequest.SerializeToString,
            triton.ModelStreamInferResponse.FromString,
        )(requests(), timeout=60)
        done.wait(SECONDS)
        done.set()
        call.cancel()
    assert server.peak_rss_bytes < before + (300 << 20), taken
    assert taken < 1000
