"""A client that does not read makes the model wait, for two kinds of instance; the server needs no memory for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from queue import SimpleQueue
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.conftest import Headrace

MIB = 1 << 20
SIZE = 10 * 1024
#: 200 MB of responses: what a server that does not wait would hold.
MANY = 20_000

#: One backend, two kinds of instance. ``produced`` counts the responses that its models have sent.
FLOOD = """
import threading
import numpy as np
from headrace import hookimpl, Backend, Instance, StreamInstance, InferResponse
from headrace.backends.base import DeferredInstance

produced = 0
ended = 0


def responses(request):
    global produced, ended
    number = -1
    try:
        for number in range(int(np.asarray(request.inputs["N"])[0])):
            data = np.zeros(10 * 1024, np.uint8)
            data[:8] = np.array([number]).view(np.uint8)
            yield InferResponse({"OUT": data})
            produced += 1
    finally:
        ended += 1


class Stream(StreamInstance):
    def stream(self, request):
        return responses(request)


class Deferred(DeferredInstance):
    def accept(self, calls):
        for call in calls:
            threading.Thread(target=self.produce, args=(call,), daemon=True).start()

    def produce(self, call):
        for response in responses(call.request):
            if call.request.cancelled:
                break
            call.send(response, final=False)
        call.send(None)


class Progress(Instance):
    def execute(self, inputs):
        return {"OUT": np.array([produced, ended])}


class Flood(Backend):
    name = "flood"

    def load(self, model):
        return {"stream": Stream, "deferred": Deferred, "progress": Progress}[model.name]()


@hookimpl
def register_backends():
    return [Flood]
"""

CONFIG = """
backend: "flood" model_transaction_policy { decoupled: true }
input { name: "N" data_type: TYPE_INT32 dims: [1] } output { name: "OUT" data_type: TYPE_UINT8 dims: [-1] }
"""
PROGRESS = """
backend: "flood"
input { name: "N" data_type: TYPE_INT32 dims: [1] } output { name: "OUT" data_type: TYPE_INT64 dims: [2] }
"""


@pytest.fixture(scope="module")
def running(keep_serving: Callable[..., Headrace], tmp_path_factory: pytest.TempPathFactory) -> Headrace:
    site, root = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("models")
    (site / "headrace_flood.py").write_text(FLOOD)
    info = site / "headrace_flood-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-flood\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headrace]\nflood = headrace_flood\n")
    for name, config in (("stream", CONFIG), ("deferred", CONFIG), ("progress", PROGRESS)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "config.pbtxt").write_text(config)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])
    return keep_serving(f"--model-repository={root}", environ={"PYTHONPATH": path})


class Caller:
    """One channel: requests ``count`` responses, and reads them when the test calls it."""

    def __init__(self, port: int) -> None:
        self._address = f"127.0.0.1:{port}"
        self._channel = grpc.insecure_channel(self._address)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def ask(self, model: str, count: int) -> Any:
        """The call, whose responses are read by iterating."""
        message = service_pb2.ModelInferRequest(model_name=model)
        message.inputs.add(name="N", datatype="INT32", shape=[1])
        message.raw_input_contents.append(np.array([count], np.int32).tobytes())
        return self._stub.ModelStreamInfer(iter([message]))

    def progress(self) -> tuple[int, int]:
        """Responses that models have been rid of, and requests that they have done with."""
        with grpcclient.InferenceServerClient(self._address) as client:
            tensor = grpcclient.InferInput("N", [1], "INT32")
            tensor.set_data_from_numpy(np.zeros(1, np.int32))
            produced, ended = client.infer("progress", [tensor]).as_numpy("OUT").tolist()
        return produced, ended

    def wait_until_still(self) -> int:
        """Return how much is produced once that has not changed for half a second."""
        last, since = -1, monotonic()

        def is_still() -> bool:
            nonlocal last, since
            produced, _ = self.progress()
            if produced != last:
                last, since = produced, monotonic()
            return monotonic() - since >= 0.5

        wait_until(is_still, "the model produces no more")
        return last

    def wait_until_ended(self, ended: int) -> None:
        wait_until(lambda: self.progress()[1] >= ended, "the model stops for a caller who has gone", 10)

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def caller(running: Headrace) -> Iterator[Caller]:
    caller = Caller(running.grpc)
    yield caller
    caller.close()


def number_of(reply: Any) -> int:
    assert not reply.error_message
    return int(np.frombuffer(reply.infer_response.raw_output_contents[0], np.int64, 1)[0])


@pytest.mark.parametrize("model", ["stream", "deferred"])
def test_a_client_that_stops_reading_stops_the_model_and_later_gets_every_response_in_order(
    running: Headrace, caller: Caller, model: str
) -> None:
    already, _ = caller.progress()
    before = running.rss_bytes
    running.forget_peak()
    call = caller.ask(model, MANY)
    first = [number_of(next(call)) for _ in range(3)]
    stopped = caller.wait_until_still() - already
    assert stopped < MANY // 4  # the rest of the way is the buffers of two sockets
    rest = [number_of(reply) for reply in call]
    assert first + rest == list(range(MANY))
    assert running.peak_rss_bytes < before + 64 * MIB


@pytest.mark.parametrize("model", ["stream", "deferred"])
def test_cancelling_a_call_that_is_not_read_frees_the_model_at_once(caller: Caller, model: str) -> None:
    _, ended = caller.progress()
    call = caller.ask(model, MANY)
    assert number_of(next(call)) == 0
    caller.wait_until_still()
    call.cancel()
    caller.wait_until_ended(ended + 1)
    assert [number_of(reply) for reply in caller.ask(model, 3)] == [0, 1, 2]


def test_two_calls_on_one_model_have_a_pace_each(caller: Caller) -> None:
    slow, fast = caller.ask("deferred", MANY), caller.ask("deferred", 2000)
    assert number_of(next(slow)) == 0
    assert [number_of(reply) for reply in fast] == list(range(2000))
    assert [number_of(reply) for reply in islice(slow, 3)] == [1, 2, 3]
    slow.cancel()


@pytest.mark.parametrize("model", ["stream", "deferred"])
def test_the_stock_client_gets_every_response_in_order_and_the_end(running: Headrace, model: str) -> None:
    results: SimpleQueue[tuple[Any, Any]] = SimpleQueue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{running.grpc}") as client:
        client.start_stream(lambda result, error: results.put((result, error)))
        tensor = grpcclient.InferInput("N", [1], "INT32")
        tensor.set_data_from_numpy(np.array([3000], np.int32))
        client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
        for number in range(3000):
            result, error = results.get(timeout=20)
            assert error is None
            assert result.as_numpy("OUT")[:8].view(np.int64)[0] == number
        result, error = results.get(timeout=20)
        assert error is None
        assert result.get_response().parameters["triton_final_response"].bool_param
        assert result.as_numpy("OUT") is None
