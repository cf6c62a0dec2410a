"""Models of an engine on headrace-llm, seen by stock clients: one in a thread of the server, one in its own process."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferenceServerException, InferInput

if TYPE_CHECKING:
    from tests.conftest import Headrace

TENSORS = """input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "stream" data_type: TYPE_BOOL dims: 1 }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: 1 }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
"""
#: A model that asks the engine, and passes on what it is given.
ASKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            asked = pb_utils.InferenceRequest(
                model_name="thread", requested_output_names=["text_output"], inputs=request.inputs())
            for response in asked.exec(decoupled=True):
                if request.is_cancelled():
                    break
                sender.send(pb_utils.InferenceResponse(response.output_tensors(), error=response.error()))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ENSEMBLE = """platform: "ensemble"
ensemble_scheduling { step { model_name: "thread" model_version: -1
  input_map { key: "text_input" value: "text_input" } input_map { key: "stream" value: "stream" }
  input_map { key: "sampling_parameters" value: "sampling_parameters" }
  output_map { key: "text_output" value: "text_output" } } }
"""
#: For hours.
LONG = 10**6


@pytest.fixture(scope="module")
def server(keep_serving: Callable[..., Headrace], install_echo: Callable[..., Path],
           tmp_path_factory: pytest.TempPathFactory) -> Headrace:  # fmt: skip
    site = install_echo(tmp_path_factory.mktemp("served"))
    thread = 'parameters { key: "isolation" value { string_value: "thread" } }'
    decoupled = "model_transaction_policy { decoupled: true }"
    for name, config in (("asks", f'backend: "python" {decoupled} {thread}\n'), ("ensemble", ENSEMBLE)):
        (site / "models" / name / "1").mkdir(parents=True)
        (site / "models" / name / "config.pbtxt").write_text(config + TENSORS)
    (site / "models/asks/1/model.py").write_text(ASKS)
    words = (f"--model-repository={site / 'models'}", "--metrics-config=histogram_latencies=true")
    return keep_serving(*words, environ={"PYTHONPATH": str(site)})


def body(text: str, max_tokens: int = 3, stream: bool = True, **more: Any) -> dict[str, Any]:
    sampling = json.dumps({"max_tokens": max_tokens, **more.pop("sampling", {})})
    return {"text_input": text, "stream": stream, "sampling_parameters": sampling, **more}


def url(server: Headrace, model: str, how: str = "generate_stream") -> str:
    return f"http://127.0.0.1:{server.http}/v2/models/{model}/{how}"


def events(response: httpx.Response) -> Iterator[Mapping[str, Any]]:
    for line in response.iter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


def told(server: Headrace, model: str, **wanted: Any) -> list[Mapping[str, Any]]:
    with httpx.stream("POST", url(server, model), json=body(**wanted), timeout=20) as response:
        return list(events(response))


def inputs(**wanted: Any) -> list[InferInput]:
    found = []
    for name, value in body(**wanted).items():
        is_text = isinstance(value, str)
        each = InferInput(name, [1], "BYTES" if is_text else "BOOL")
        each.set_data_from_numpy(np.array([value], np.object_ if is_text else np.bool_))
        found.append(each)
    return found


class GrpcStream:
    """One request on a stream of the stock client."""

    def __init__(self, server: Headrace, model: str, stream_timeout: float | None = None, **wanted: Any) -> None:
        self.client = InferenceServerClient(f"127.0.0.1:{server.grpc}")
        self._answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self._answers.put((result, error)), stream_timeout)
        self.client.async_stream_infer(model, inputs(**wanted), enable_empty_final_response=True)

    def next(self) -> str | None:
        """The next text; None at the end. Raises the client's exception."""
        result, error = self._answers.get(timeout=10)
        if error is not None:
            raise error
        is_last = result.get_response().parameters["triton_final_response"].bool_param
        text = result.as_numpy("text_output")
        return None if text is None and is_last else str(text[0].decode())

    def read_all(self) -> None:
        while self.next() is not None:
            pass

    def close(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


MODELS = pytest.mark.parametrize("model", ["thread", "process", "asks", "ensemble"])


@MODELS
def test_text_is_streamed_over_http_and_grpc(server: Headrace, model: str) -> None:
    given = told(server, model, text="a b")
    assert [each.get("text_output", each) for each in given] == [" a", " b", " a"]
    with closing(GrpcStream(server, model, text="a b")) as stream:
        assert [stream.next() for _ in range(3)] == [" a", " b", " a"]


def test_one_response_over_http_has_the_whole_text(server: Headrace) -> None:
    answer = httpx.post(url(server, "process", "generate"), json=body("a b", stream=False)).json()
    assert answer["text_output"] == "a b a b a"


# ---------------------------------------------------------------------- who leaves


def wait_until_open(server: Headrace, model: str, count: int) -> None:
    """Until the engine that writes for ``model`` has ``count`` requests."""
    server.wait_until_metric("nv_llm_streams", "process" if model == "process" else "thread", count)


def leave_generate(server: Headrace, model: str) -> None:
    with suppress(httpx.ReadTimeout):
        httpx.post(url(server, model, "generate"), json=body("a b", LONG, stream=False), timeout=0.2)


def leave_stream(server: Headrace, model: str) -> None:
    with httpx.stream("POST", url(server, model), json=body("a b", LONG)) as response:
        found = events(response)  # kept: its end would close the connection
        next(found)
        wait_until_open(server, model, 1)


def cancel_grpc(server: Headrace, model: str) -> None:
    stream = GrpcStream(server, model, text="a b", max_tokens=LONG)
    assert stream.next() == " a"
    wait_until_open(server, model, 1)
    stream.close()


def exceed_grpc_deadline(server: Headrace, model: str) -> None:
    stream = GrpcStream(server, model, stream_timeout=0.3, text="a b", max_tokens=LONG)
    with pytest.raises(InferenceServerException, match="Deadline Exceeded"):
        stream.read_all()
    stream.close()


@pytest.mark.parametrize(
    ("model", "leave"),
    [
        *product(("thread", "process", "asks", "ensemble"), (leave_stream, cancel_grpc, exceed_grpc_deadline)),
        *product(("thread", "process"), (leave_generate,)),
    ],
)
def test_who_leaves_frees_the_place(server: Headrace, model: str, leave: Callable[[Any, str], None]) -> None:
    leave(server, model)
    wait_until_open(server, model, 0)
    assert told(server, model, text="a")


@pytest.mark.parametrize("model", ["thread", "process"])
def test_a_timeout_ends_the_answer(server: Headrace, model: str) -> None:
    wanted = body("a b", LONG, stream=False, timeout=60_000)
    answer = httpx.post(url(server, model, "generate"), json=wanted, timeout=20)
    assert (answer.status_code, answer.json()) == (503, {"error": "Request timeout expired"})
    last = told(server, model, text="a b", max_tokens=LONG, timeout=60_000)[-1]
    assert last == {"error": "Request timeout expired"}
    server.wait_until_metric("nv_llm_streams", model, 0)


@pytest.mark.parametrize("model", ["thread", "process"])
def test_a_priority_reaches_the_engine(server: Headrace, model: str) -> None:
    assert told(server, model, text="priority", max_tokens=1, priority=7)[0]["text_output"] == " 7"


# ---------------------------------------------------------------------- what goes wrong


WRONG = [
    (body("a", sampling={"temperature": "hot"}), "temperature must be a number from 0 to 100, got 'hot'"),
    (body("a", sampling={"stop": ["x"] * 10_000}), "stop has 10000 strings, the limit is 16"),
    (body("a", sampling={"logit_bias": dict.fromkeys(range(10**4), 1)}), "logit_bias has 10000 members"),
    (body("a", sampling={"no_such_member": 1}), "sampling parameter 'no_such_member' is not one of this engine"),
    (body("a") | {"sampling_parameters": "[" * 10**4}, "sampling_parameters is not JSON"),
    (body("a") | {"sampling_parameters": "7"}, "sampling_parameters must be a JSON object, got a number"),
    (body("a") | {"text_input": ["a", "b"]}, "'text_input'"),
    (body("a") | {"text_input": ""}, "a prompt is one of text_input, input_ids and messages"),
    (body("a") | {"input_ids": [1, 2]}, "got text_input and input_ids"),
    (body("") | {"messages": "[{}, 0]"}, "a member of messages must be a JSON object, got 0"),
    ({"text_input": "a", "temperature": "hot"}, "temperature must be a number from 0 to 100, got 'hot'"),
    (body("a", timeout="soon"), "timeout must be a whole number from 0 to 9223372036854775807, got 'soon'"),
    (body("a", priority=-1), "priority must be a whole number from 0"),
    ({"text_input": "a", "max_tokens": 0}, "max_tokens must be a whole number from 1"),
]


@pytest.mark.parametrize("model", ["thread", "process"])
def test_wrong_input_is_refused_with_what_is_wrong(server: Headrace, model: str) -> None:
    for how in ("generate", "generate_stream"):
        for wanted, text in WRONG:
            answer = httpx.post(url(server, model, how), json=wanted, timeout=20)
            assert answer.status_code == 400, wanted
            assert text in answer.json()["error"], wanted
            assert len(answer.json()["error"]) < 400
    assert server.metric("nv_llm_streams", model) == 0


@pytest.mark.parametrize(
    ("member", "value"), [("text_input", 7), ("text_input", {}), ("stream", "yes"), ("sampling_parameters", {"n": 1})]
)
def test_a_value_of_another_type_is_refused_as_by_tritons_generate(server: Headrace, member: str, value: Any) -> None:
    answer = httpx.post(url(server, "thread", "generate"), json=body("a") | {member: value})
    assert answer.status_code == 500
    assert "attempt to access JSON" in answer.json()["error"]


@pytest.mark.parametrize("text", [b'{"text_input": "\\ud800"}', b'{"text_input": "\xff"}'])
def test_text_that_is_not_unicode_is_refused(server: Headrace, text: bytes) -> None:
    answer = httpx.post(url(server, "thread", "generate"), content=text)
    assert answer.status_code == 500, answer.text  # as Triton's generate answers wrong JSON
    assert "failed to parse the request JSON buffer" in answer.json()["error"]


def test_an_engine_that_dies_ends_all_streams_with_an_error_and_comes_back(server: Headrace) -> None:
    streams = [GrpcStream(server, "process", text="a b", max_tokens=LONG) for _ in range(16)]
    for stream in streams:
        assert stream.next() == " a"
    killer = told(server, "process", text="die")
    assert "exited with status 7" in killer[-1]["error"]
    for stream in streams:
        with pytest.raises(InferenceServerException, match="exited with status 7"):
            stream.read_all()
        stream.close()
    server.wait_until_metric("nv_llm_streams", "process", 0)
    assert [each["text_output"] for each in told(server, "process", text="a b")] == [" a", " b", " a"]


# ---------------------------------------------------------------------- what is seen


@pytest.mark.parametrize("model", ["thread", "process"])
def test_tokens_and_their_times_are_on_the_page_of_metrics(server: Headrace, model: str) -> None:
    names = ("output_tokens", "input_tokens", "queue_time_ms_count", "time_to_first_token_ms_count",
             "time_between_tokens_ms_count")  # fmt: skip
    server.wait_until_metric("nv_llm_streams", model, 0)
    before = [server.metric(f"nv_llm_{name}", model) for name in names]
    first = server.metric("nv_inference_first_response_histogram_ms_count", model)
    assert len(told(server, model, text="a b", max_tokens=20)) == 20
    for name, had, more in zip(names, before, (20, 2, 1, 1, 19), strict=True):
        server.wait_until_metric(f"nv_llm_{name}", model, had + more)
    assert server.metric("nv_inference_first_response_histogram_ms_count", model) == first + 1
    assert server.metric("nv_llm_time_between_tokens_ms_sum", model) > 0


@pytest.mark.parametrize("model", ["thread", "process"])
def test_the_use_of_the_cache_is_a_metric_and_a_header_for_load_balancers(server: Headrace, model: str) -> None:
    told(server, model, text="a")
    server.wait_until_metric("nv_llm_cache_usage_ratio", model, 0.25)
    wanted = {"endpoint-load-metrics-format": "text"}
    answer = httpx.post(url(server, model, "generate"), json=body("a", stream=False), headers=wanted)
    assert answer.headers["endpoint-load-metrics"] == "TEXT named_metrics.kv_cache_utilization=0.25"
