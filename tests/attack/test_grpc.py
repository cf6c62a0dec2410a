"""What stock clients may do to a gRPC port without meaning harm, and what hostile ones do with calls and messages."""

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
    from tests.conftest import Penstock

SERVICE = "/inference.GRPCInferenceService/"
SECONDS = 3.0
Frame = Callable[..., AbstractContextManager[None]]


def request(size: int = 2, model: str = "echo") -> triton.ModelInferRequest:
    content = np.arange(size, dtype=np.float32) if model == "echo" else np.zeros(size, np.uint8)
    made = triton.ModelInferRequest(model_name=model, raw_input_contents=[content.tobytes()])
    made.inputs.add(name="IN", datatype="FP32" if model == "echo" else "UINT8", shape=[size])
    return made


def model_infer(channel: grpc.Channel) -> Any:
    return channel.unary_unary(
        f"{SERVICE}ModelInfer", triton.ModelInferRequest.SerializeToString, triton.ModelInferResponse.FromString
    )


def test_a_client_that_cancels_as_fast_as_it_can(attacked: Penstock, under_attack: Frame) -> None:
    """Other calls of the same channel all succeed: no GOAWAY, though nothing is answered for thousands of calls."""
    end = time.monotonic() + SECONDS

    def cancel(call: Any) -> int:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # it is on another machine
        count = 0
        while time.monotonic() < end:
            for _ in range(20):
                call.future(request(), timeout=20).cancel()
            count += 20
            threading.Event().wait(0.003)  # the client's own threads need the interpreter, too
        return count

    def ask(call: Any) -> int:
        count = 0
        while time.monotonic() < end:
            asked = request(3)
            assert call(asked, timeout=20).raw_output_contents == asked.raw_input_contents
            count += 1
        return count

    with under_attack(attacked), grpc.insecure_channel(f"127.0.0.1:{attacked.grpc}") as channel:
        call = model_infer(channel)
        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask, call) for _ in range(2)]
            cancelling = [pool.submit(cancel, call) for _ in range(6)]
            assert sum(each.result() for each in cancelling) > 500 * SECONDS
            assert all(each.result() for each in asking)


def test_a_stream_of_answers_that_nobody_reads(attacked: Penstock, under_attack: Frame) -> None:
    """A thousand requests of a megabyte each, none of whose answers is read: 1 GB, of which the server takes 64 MB."""
    asked = triton.ModelInferRequest(model_name="huge", raw_input_contents=[bytes(1 << 20)])
    asked.inputs.add(name="IN", datatype="UINT8", shape=[1 << 20])
    done, taken = threading.Event(), 0

    def requests() -> Iterator[triton.ModelInferRequest]:
        nonlocal taken
        while taken < 1024 and not done.is_set():
            taken += 1
            yield asked

    options = [("grpc.max_receive_message_length", -1), ("grpc.http2.bdp_probe", 0)]
    with (
        under_attack(attacked),
        grpc.insecure_channel(f"127.0.0.1:{attacked.grpc}", options) as channel,
    ):
        before = attacked.rss_bytes
        call: Any = channel.stream_stream(
            f"{SERVICE}ModelStreamInfer",
            triton.ModelInferRequest.SerializeToString,
            triton.ModelStreamInferResponse.FromString,
        )(requests(), timeout=60)
        done.wait(SECONDS)
        peak = attacked.peak_rss_bytes
        done.set()
        call.cancel()
        assert peak < before + (300 << 20), (peak, taken)
        assert taken < 1000
