"""The trace context inside Python models, in the server's process and in one of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.extensions.trace.collector import Collector, collecting

if TYPE_CHECKING:
    from tests.conftest import Headrace

#: Answers with the context of its request, and with the current one.
TELLS = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils
from opentelemetry import trace

class TritonPythonModel:
    ASYNCexecute(self, requests):
        span = trace.get_current_span().get_span_context()
        current = [f"{span.trace_id:032x}", f"{span.span_id:016x}"]
        answers = []
        for request in requests:
            text = json.dumps([request.trace().get_context(), current])
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([text.encode()], np.object_))]))
        return answers
"""
CONFIG = """backend: "python"
instance_group { kind: KIND_CPU }
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_STRING dims: 1 }
parameters { key: "isolation" value { string_value: "ISOLATION" } }
"""
#: Without opentelemetry in the model.
PLAIN = (
    TELLS.replace("from opentelemetry import trace\n", "")
    .replace("trace.get_current_span().get_span_context()", "None")
    .replace('[f"{span.trace_id:032x}", f"{span.span_id:016x}"]', "[]")
)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture
def start_model(serve: Callable[..., Headrace], tmp_path: Path, collector: Collector) -> Callable[..., Headrace]:
    def run(code: str, isolation: str) -> Headrace:
        (tmp_path / "models/tells/1").mkdir(parents=True)
        (tmp_path / "models/tells/1/model.py").write_text(code)
        (tmp_path / "models/tells/config.pbtxt").write_text(CONFIG.replace("ISOLATION", isolation))
        sent = ("mode=opentelemetry", f"opentelemetry,url={collector.url}", "level=TIMESTAMPS", "rate=2")
        return serve(f"--model-repository={tmp_path / 'models'}", *(f"--trace-config={each}" for each in sent))

    return run


def ask_model(server: Headrace, **headers: str) -> Any:
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    answer = httpx.post(f"http://127.0.0.1:{server.http}/v2/models/tells/infer", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.json()["outputs"][0]["data"][0])


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("kind", ["def ", "async def "])
def test_the_context_of_a_request_is_current_in_its_model(
    start_model: Callable[..., Headrace], collector: Collector, isolation: str, kind: str
) -> None:
    server = start_model(TELLS.replace("ASYNC", kind), isolation)
    context, current = ask_model(server)
    assert (context, current) == (None, ["0" * 32, "0" * 16]), "the first of two requests is not traced"
    context, current = ask_model(server)
    assert context == f'{{"traceparent":"00-{current[0]}-{current[1]}-01"}}'
    again, current_again = ask_model(server, traceparent=f"00-{'a' * 32}-{'b' * 16}-01", tracestate="x=y")
    assert json.loads(again) == {"traceparent": f"00-{'a' * 32}-{current_again[1]}-01", "tracestate": "x=y"}
    server.stop()
    spans = [span for span in collector.spans if span.name == "tells"]
    assert [[span.trace_id, span.id] for span in spans] == [current, current_again]


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_a_model_without_opentelemetry_reads_the_context(start_model: Callable[..., Headrace], isolation: str) -> None:
    server = start_model(PLAIN.replace("ASYNC", "def "), isolation)
    assert [ask_model(server)[0] is None for _ in range(4)] == [True, False, True, False]
