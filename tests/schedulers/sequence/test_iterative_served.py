"""Iterative sequences on a real server: a Python model that reschedules requests of the stock client."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException

from headrace import Server
from headrace_testing.serving import serve

#: Counts down from ``IN``, one step per run. Every run adds a line to ``log`` with its requests and controls. A request
#: of 100 runs until a file ``go`` exists. A request of 13 fails in its second run.
MODEL = """
import json
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

def told(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().ravel()[0].item()

class TritonPythonModel:
    def initialize(self, args):
        self.decoupled = "decoupled" in args["model_name"]
        self.left, self.folder = {}, Path(__file__).parent

    def execute(self, requests):
        run = [
            [request.request_id(), told(request, "START"), request.flags(), request.correlation_id()]
            for request in requests
            if told(request, "READY") != 0
        ]
        with (self.folder / "log").open("a") as log:
            log.write(json.dumps(run) + "\\n")
        answers = [self.step(request) for request in requests]
        return None if self.decoupled else answers

    def step(self, request):
        number, id = told(request, "IN"), told(request, "ID")
        if told(request, "READY") == 0:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros((1, 1), np.int32))])
        if told(request, "START") != 0:
            self.left[id] = number
        elif number == 13:
            raise ValueError("half way")
        if number != 100 or (self.folder / "go").exists():
            self.left[id] -= 1 if number != 100 else 100
        left = self.left[id]
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[left]], np.int32))])
        if left:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if self.decoupled:
            final = 0 if left else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            if number != 100:
                request.get_response_sender().send(response, final)
            elif final:
                request.get_response_sender().send(flags=final)
            return None
        return None if left else response
"""
CONFIG = """backend: "python" max_batch_size: 4
input { name: "IN" data_type: TYPE_INT32 dims: 1 } output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
BATCHING = """sequence_batching { iterative_sequence: true %s
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }
    control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } }"""
#: The decoupled models share one resource: each frees it between two runs.
SHARED = """instance_group { kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 global: true } } }
"""
#: Keeps a request open until another one arrives.
LATER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.open = []

    def execute(self, requests):
        self.open += [(request.get_response_sender(), request) for request in requests]
        while len(self.open) > 1:
            for sender, request in self.open:
                number = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", number)])
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            self.open.clear()
"""
THREAD = 'parameters { key: "isolation" value { string_value: "thread" } }'
#: Is handed back, too, which is no reason not to load.
WARM_UP = """model_warmup { name: "zero" batch_size: 1
    inputs { key: "IN" value { data_type: TYPE_INT32 dims: 1 zero_data: true } } }"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
MODELS = {
    "direct_process": BATCHING % "direct { }" + WARM_UP,
    "oldest_thread": BATCHING % "oldest { }" + THREAD + WARM_UP,
    "decoupled_process": BATCHING % "oldest { }" + DECOUPLED,
    "decoupled_thread": BATCHING % "direct { }" + DECOUPLED + THREAD,
    "plain": "",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    for name, batching in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1/model.py").write_text(MODEL)
        limits = SHARED if "decoupled" in name else "instance_group { kind: KIND_CPU }"
        (repository / name / "config.pbtxt").write_text(CONFIG + batching + limits)
    (repository / "decoupled_later/1").mkdir(parents=True)
    (repository / "decoupled_later/1/model.py").write_text(LATER)
    (repository / "decoupled_later/config.pbtxt").write_text(CONFIG + DECOUPLED + SHARED)
    with serve(repository, listen=True, rate_limit="execution_count") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as connection:
        yield connection


def folder(server: Server, model: str) -> Path:
    return server.served(model)[0].model.path


def runs(server: Server, model: str) -> list[list[list[Any]]]:
    """Return the requests of each run since the last call."""
    log = folder(server, model) / "log"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [json.loads(line) for line in lines]


def numbered(module: Any, number: int) -> list[Any]:
    tensor = module.InferInput("IN", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[number]], np.int32))
    return [tensor]


class Caller:
    """A caller with its own stream, so that many requests run at once."""

    def __init__(self, server: Server, model: str, number: int, **options: Any) -> None:
        self.answers: queue.Queue[Any] = queue.Queue()
        self.client = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}")
        self.client.start_stream(lambda result, error: self.answers.put(error or result))
        options["enable_empty_final_response"] = "decoupled" in model
        self.client.async_stream_infer(model, numbered(tritonclient.grpc, number), **options)

    def all(self) -> list[Any]:
        """Return the content of each answer, up to the last."""
        values = []
        while True:
            answer = self.answers.get(timeout=90)
            if isinstance(answer, Exception):
                values.append(str(answer))
                break
            tensor = answer.as_numpy("OUT")
            values += [] if tensor is None else tensor.ravel().tolist()
            parameters = answer.get_response().parameters
            if "triton_final_response" not in parameters or parameters["triton_final_response"].bool_param:
                break
        self.cancel()
        return values

    def cancel(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


ALL = pytest.mark.parametrize("model", [name for name in MODELS if name != "plain"])


@ALL
def test_one_request_runs_until_its_model_is_done_and_counts_each_run(model: str, server: Server) -> None:
    runs(server, model)
    before = server.served(model)[0].snapshot()
    values = Caller(server, model, 3, request_id="a").all()
    assert values == ([2, 1, 0] if "decoupled" in model else [0])
    shown = runs(server, model)
    number = shown[0][0][3]
    assert shown == [[["a", 1, 1, number]], [["a", 0, 0, number]], [["a", 0, 0, number]]]
    after = server.served(model)[0].snapshot()  # as in Triton: every run is an inference that has succeeded
    counts = [(each.success.count, each.executions.inference_count) for each in (before, after)]
    assert [now - then for then, now in zip(*counts, strict=True)] == [3, 3]


@ALL
def test_a_new_request_shares_batches_with_an_iterating_one(
    model: str, server: Server, wait_until: Callable[..., None]
) -> None:
    (folder(server, model) / "go").unlink(missing_ok=True)
    runs(server, model)
    first = Caller(server, model, 100, request_id="long")
    wait_until((folder(server, model) / "log").exists, "the first runs")
    second = Caller(server, model, 5, request_id="short")
    assert second.all() == ([4, 3, 2, 1, 0] if "decoupled" in model else [0])
    (folder(server, model) / "go").touch()
    assert first.all() == ([] if "decoupled" in model else [0])
    both = [run for run in runs(server, model) if "short" in [name for name, *_ in run]]
    assert [sorted(name for name, *_ in run) for run in both] == [["long", "short"]] * 5
    assert len({number for run in both for *_, number in run}) == 2


@ALL
def test_after_a_failed_run_the_next_request_is_served(model: str, server: Server) -> None:
    values = Caller(server, model, 13).all()
    assert "ValueError: half way" in values[-1]
    assert values[:-1] == ([12] if "decoupled" in model else [])
    assert Caller(server, model, 2).all() == ([1, 0] if "decoupled" in model else [0])


@ALL
def test_a_cancelled_request_is_not_run_again(model: str, server: Server, wait_until: Callable[..., None]) -> None:
    (folder(server, model) / "go").unlink(missing_ok=True)
    runs(server, model)
    leaving = Caller(server, model, 100, request_id="gone")
    wait_until(lambda: bool(runs(server, model)), "it runs")
    leaving.cancel()
    wait_until(lambda: not server.served(model)[0].model_queue.in_flight, "it has left")
    runs(server, model)
    assert Caller(server, model, 2, request_id="next").all() == ([1, 0] if "decoupled" in model else [0])
    shown = [name for run in runs(server, model) for name, *_ in run]
    assert shown[-2:] == ["next", "next"]
    assert shown.count("gone") <= 1  # the run that was in progress at the cancellation


@pytest.mark.parametrize("model", ["direct_process", "oldest_thread"])
def test_over_http_an_own_id_must_be_started(model: str, server: Server) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.options.http_port}") as client:
        ask = numbered(tritonclient.http, 3)
        for options in ({}, {"sequence_id": 77, "sequence_start": True}, {"sequence_id": 7, "sequence_start": True}):
            assert client.infer(model, ask, **options).as_numpy("OUT").tolist() == [[0]]
        with pytest.raises(InferenceServerException, match=r"for sequence 7 to .* must specify the START flag"):
            client.infer(model, ask, sequence_id=7)
        both = client.infer(model, ask, sequence_id=7, sequence_start=True, sequence_end=True)
        assert both.as_numpy("OUT").tolist() == [[0]]


def test_a_reschedule_of_a_model_that_is_not_iterative_gets_the_error_of_triton(client: Any) -> None:
    with pytest.raises(InferenceServerException) as refusal:
        client.infer("plain", numbered(tritonclient.grpc, 3))
    assert refusal.value.status() == "StatusCode.INTERNAL"
    assert refusal.value.message() == (
        "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to handle "
        "such a flag."
    )


def test_an_iterating_request_frees_its_resources_between_runs(server: Server, wait_until: Callable[..., None]) -> None:
    (folder(server, "decoupled_process") / "go").unlink(missing_ok=True)
    runs(server, "decoupled_process")
    endless = Caller(server, "decoupled_process", 100)
    wait_until((folder(server, "decoupled_process") / "log").exists, "it runs")
    assert Caller(server, "decoupled_thread", 5).all() == [4, 3, 2, 1, 0]
    endless.cancel()


def test_a_decoupled_model_that_answers_later_has_freed_its_resources(server: Server) -> None:
    callers = [Caller(server, "decoupled_later", number) for number in (1, 2)]
    assert [caller.all() for caller in callers] == [[1], [2]]
