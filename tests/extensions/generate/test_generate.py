"""The generate extension: a real Triton's answers, the kit, and streams that end early."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from headrace import Server
from headrace_generate.load_metrics import load_metrics
from headrace_testing import ExtensionConformance, ServedExtension
from headrace_testing.serving import serve

from .recorded import QUESTIONS, ask, write_repository

#: Sends a response each 10 ms until the caller has left. Files say when it begins and ends.
ENDLESS = """
import pathlib, time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            index = 0
            pathlib.Path("BEGUN").touch()
            while not sender.is_cancelled():
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([index], np.int32))]))
                index += 1
                time.sleep(0.01)
            pathlib.Path("LEFT").touch()
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
#: Answers with N - 1, N - 2, ... 0, and runs once for each of these.
COUNTDOWN = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            number = pb_utils.get_input_tensor_by_name(request, "ID").as_numpy().ravel()[0].item()
            if pb_utils.get_input_tensor_by_name(request, "START").as_numpy().ravel()[0]:
                self.left[number] = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy().ravel()[0])
            left = self.left[number] = self.left[number] - 1
            if left:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[left]], np.int32))])
            final = 0 if left else pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            request.get_response_sender().send(response, final)
"""
ITERATIVE = """max_batch_size: 4 sequence_batching { iterative_sequence: true oldest { }
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } } }
"""
CONFIG = """backend: "python" instance_group { kind: KIND_CPU } model_transaction_policy { decoupled: true }
input { name: "N" data_type: TYPE_INT32 dims: [1] } output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
"""


class TestKit(ExtensionConformance):
    plugin, extension = "headrace_generate", "generate"

    def ask(self, served: ServedExtension) -> None:
        status, _, body = served.http("POST", "/v2/models/doubles/generate", b'{"x": [1, 2]}')
        assert (status, json.loads(body)["y"]) == (200, [2, 4])
        status, _, body = served.http("POST", "/v2/models/doubles/generate_stream", b'{"x": [3, 4]}')
        assert (status, json.loads(body.removeprefix(b"data: "))["y"]) == (200, [6, 8])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    write_repository(repository)
    left = repository / "left"
    (repository / "endless" / "1").mkdir(parents=True)
    (repository / "endless" / "config.pbtxt").write_text(CONFIG)
    (repository / "endless" / "1" / "model.py").write_text(
        ENDLESS.replace("LEFT", str(left)).replace("BEGUN", str(repository / "begun"))
    )
    (repository / "countdown" / "1").mkdir(parents=True)
    (repository / "countdown" / "config.pbtxt").write_text(CONFIG + ITERATIVE)
    (repository / "countdown" / "1" / "model.py").write_text(COUNTDOWN)
    with serve(repository, listen=True) as running:
        yield running


def test_answers_are_tritons_or_differ_for_a_reason(server: Server) -> None:
    wrong = []
    for question in QUESTIONS:
        answer = ask(server.options.http_port, question)
        is_same = answer == (question["status"], question["type"], question["answer"])
        if is_same is ("deviation" in question):
            wrong.append(f"{question}\n    is answered {answer}")
    assert not wrong, "\n".join(wrong)
    reasons = Counter(question["deviation"] for question in QUESTIONS if "deviation" in question)
    assert sum(reasons.values()) < len(QUESTIONS) / 5


@pytest.mark.parametrize("how", ["generate", "generate_stream"])
def test_a_caller_that_leaves_ends_the_work(server: Server, wait_until: Callable[..., None], how: str) -> None:
    begun, left = (Path(server.options.model_repository[0]) / name for name in ("begun", "left"))
    begun.unlink(missing_ok=True)
    left.unlink(missing_ok=True)
    head = f"POST /v2/models/endless/{how} HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.options.http_port), timeout=20) as caller:
        caller.sendall(head.encode() + b'{"N": 1}')
        wait_until(begun.exists, "the model runs")
    wait_until(left.exists, "the model ends")


def test_sequence_members_make_a_sequence(server: Server) -> None:
    def seen(**members: Any) -> dict[str, Any]:
        answer = httpx.post(f"http://127.0.0.1:{server.options.http_port}/v2/models/seq/generate", json=members)
        assert answer.status_code == 200, answer.text
        return json.loads(answer.json()["SEEN"])  # type: ignore[no-any-return]

    first = seen(N=1, sequence_id=2**64 - 1, sequence_start=True)
    assert (first["sequence"], first["flags"]) == (2**64 - 1, 1)
    last = seen(N=1, parameters={"sequence_id": 2**64 - 1, "sequence_end": True})
    assert (last["sequence"], last["flags"]) == (2**64 - 1, 2)


def test_an_iterative_sequence_streams_what_it_makes_beside_others(server: Server) -> None:
    url = f"http://127.0.0.1:{server.options.http_port}/v2/models/countdown/generate_stream"

    def count(start: int) -> list[int]:
        events = httpx.post(url, json={"N": start}, timeout=30).text.split("\n\n")[:-1]
        return [json.loads(event.removeprefix("data: "))["OUT"] for event in events]

    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(count, (5, 30, 1, 12)))
    assert counts == [list(range(start - 1, -1, -1)) for start in (5, 30, 1, 12)]


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ({"sequence_id": -1}, "Unable to parse 'sequence_id': attempt to access JSON non-string as string"),
        ({"sequence_id": 2**64}, "Unable to parse 'sequence_id': attempt to access JSON non-string as string"),
        ({"sequence_id": "x" * 129}, "string correlation ID cannot be longer than 128 characters"),
        ({"sequence_start": 1}, "Unable to parse 'sequence_start': attempt to access JSON non-boolean as boolean"),
    ],
)
def test_a_bad_sequence_member_is_named(server: Server, members: dict[str, Any], text: str) -> None:
    url = f"http://127.0.0.1:{server.options.http_port}/v2/models/seq/generate"
    assert httpx.post(url, json={"N": 1, **members}).json() == {"error": text}


def test_large_bodies_are_read_up_to_a_bound(server: Server) -> None:
    url = f"http://127.0.0.1:{server.options.http_port}/v2/models/seen/generate"
    long = "é" * 1_000_000
    answer = httpx.post(url, json={"STRING": long}, timeout=30)
    assert json.loads(answer.json()["SEEN"])["inputs"]["STRING"][2][0].encode("latin-1").decode() == long
    refused = httpx.post(url, json={"INT32": [1] * 70_000}, timeout=30)
    assert (refused.status_code, "more than 65536 values" in refused.text) == (400, True), refused.text
    refused = httpx.post(url, json={"STRING": "x" * (5 << 20)}, timeout=30)
    assert (refused.status_code, "4194304" in refused.text) == (400, True), refused.text


class Family:
    def __init__(self, values: dict[str, float]) -> None:
        self.name = "nv_trt_llm_kv_cache_block_metrics"
        self.samples = [Sample({"kv_cache_block_type": name}, value) for name, value in values.items()]


class Sample:
    def __init__(self, labels: dict[str, str], value: float) -> None:
        self.labels, self.value = labels, value


@pytest.mark.parametrize(
    ("wanted", "value"),
    [
        (b"json", b'JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":6400}}'),
        (b"text", b"TEXT named_metrics.kv_cache_utilization=0.25, named_metrics.max_token_capacity=6400"),
        (b"xml", None),
    ],
)
def test_load_metrics_are_how_full_the_cache_is(wanted: bytes, value: bytes | None) -> None:
    family = Family({"used": 25, "max": 100, "tokens_per": 64, "free": 75})
    assert load_metrics(wanted, [family]) == value
    assert load_metrics(wanted, [Family({"used": 25})]) is None


def test_load_metrics_of_engines_that_say_a_ratio_are_those_of_the_fullest() -> None:
    usage = SimpleNamespace(name="nv_llm_cache_usage_ratio", samples=[Sample({"model": "a"}, 0.25), Sample({}, 0.5)])
    assert load_metrics(b"text", [usage]) == b"TEXT named_metrics.kv_cache_utilization=0.5"
    blocks = Family({"used": 25, "max": 100, "tokens_per": 64})
    assert load_metrics(b"text", [usage, blocks]) == load_metrics(b"text", [blocks])  # Triton's come first


def test_load_metrics_of_a_model_are_in_the_head(tmp_path: Path) -> None:
    code = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        name = "nv_trt_llm_kv_cache_block_metrics"
        self.family = pb_utils.MetricFamily(name, "Blocks.", pb_utils.MetricFamily.GAUGE)
        self.metrics = [self.family.Metric({"kv_cache_block_type": name}) for name in ("used", "max", "tokens_per")]
        for metric, value in zip(self.metrics, (1, 4, 32)):
            metric.set(value)

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([1], np.int32))]) for _ in requests]
"""
    (tmp_path / "llm/1").mkdir(parents=True)
    (tmp_path / "llm/1/model.py").write_text(code)
    (tmp_path / "llm/config.pbtxt").write_text(CONFIG.replace("model_transaction_policy { decoupled: true }", ""))
    with serve(tmp_path, listen=True, allow_metrics=True, metrics_port=0) as server:
        url = f"http://127.0.0.1:{server.options.http_port}/v2/models/llm/generate"
        for how in ("generate", "generate_stream"):
            answer = httpx.post(
                url.replace("generate", how), json={"N": 1}, headers={"endpoint-load-metrics-format": "text"}
            )
            value = "TEXT named_metrics.kv_cache_utilization=0.25, named_metrics.max_token_capacity=128"
            assert answer.headers["endpoint-load-metrics"] == value
        assert "endpoint-load-metrics" not in httpx.post(url, json={"N": 1}).headers
