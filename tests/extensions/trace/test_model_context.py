"""The trace context in Python models, in the server's process and in their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.extensions.trace.collector import Collector, ReceivedSpan, collecting
from tests.extensions.trace.recorded import ask

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


ISOLATIONS, KINDS = ("thread", "process"), ("def ", "async def ")
#: Code and isolation of each model.
MODELS = {f"tells_{isolation}_{kind.split()[0]}": (TELLS.replace("ASYNC", kind), isolation)
          for isolation in ISOLATIONS for kind in KINDS}  # fmt: skip
MODELS |= {f"plain_{isolation}": (PLAIN.replace("ASYNC", "def "), isolation) for isolation in ISOLATIONS}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace], collector: Collector
) -> Headrace:
    """Serves `MODELS`, and samples each by itself: the second of two requests is traced."""
    root = tmp_path_factory.mktemp("models")
    for name, (code, isolation) in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "1/model.py").write_text(code)
        (root / name / "config.pbtxt").write_text(CONFIG.replace("ISOLATION", isolation))
    sent = ("mode=opentelemetry", f"opentelemetry,url={collector.url}", "level=TIMESTAMPS", "rate=1000")
    server = keep_serving(f"--model-repository={root}", *(f"--trace-config={each}" for each in sent))
    for name in MODELS:
        assert ask(server.http, f"/v2/models/{name}/trace/setting", {"trace_rate": "2"})[0] == 200
    return server


def ask_model(server: Headrace, model: str, **headers: str) -> Any:
    body = {"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}]}
    answer = httpx.post(f"http://127.0.0.1:{server.http}/v2/models/{model}/infer", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return json.loads(answer.json()["outputs"][0]["data"][0])


@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith("tells_")])
def test_the_context_of_a_request_is_current_in_its_model(
    server: Headrace, collector: Collector, wait_until: Callable[..., None], model: str
) -> None:
    def own() -> list[ReceivedSpan]:
        return [span for span in collector.spans if span.name == model]

    context, current = ask_model(server, model)
    assert (context, current) == (None, ["0" * 32, "0" * 16]), "the first of two requests is not traced"
    context, current = ask_model(server, model)
    assert context == f'{{"traceparent":"00-{current[0]}-{current[1]}-01"}}'
    again, current_again = ask_model(server, model, traceparent=f"00-{'a' * 32}-{'b' * 16}-01", tracestate="x=y")
    assert json.loads(again) == {"traceparent": f"00-{'a' * 32}-{current_again[1]}-01", "tracestate": "x=y"}
    wait_until(lambda: len(own()) == 2, "the collector has the spans of both")
    assert [[span.trace_id, span.id] for span in own()] == [current, current_again]


@pytest.mark.parametrize("model", [name for name in MODELS if name.startswith("plain_")])
def test_a_model_without_opentelemetry_reads_the_context(server: Headrace, model: str) -> None:
    assert [ask_model(server, model)[0] is None for _ in range(4)] == [True, False, True, False]
