"""Tokens that models report, over real sockets: charged after the response, and counted on the metrics page."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tritonclient import grpc as grpc_client

from headrace_http import text_format
from headrace_quotas import QuotaOptions
from headrace_testing.serving import on_loop, serve
from tests.interceptors.quotas.test_limits import Filed

#: A model that reports the new tokens of each response on request, as Triton's backend for vLLM.
_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            asked = pb_utils.get_input_tensor_by_name(request, "return_num_output_tokens")
            for _ in range(3):
                outputs = [pb_utils.Tensor("text_output", np.array([b"word"], np.object_))]
                if asked is not None and asked.as_numpy()[0]:
                    outputs.append(pb_utils.Tensor("num_output_tokens", np.array([5], np.uint32)))
                sender.send(pb_utils.InferenceResponse(outputs))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_CONFIG = """name: "llm" backend: "python" model_transaction_policy { decoupled: true }
input [ { name: "text_input" data_type: TYPE_STRING dims: 1 },
        { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: 1 optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: -1 },
         { name: "num_output_tokens" data_type: TYPE_UINT32 dims: -1 } ]
parameters { key: "isolation" value { string_value: "thread" } }"""
_WORDS = _CONFIG.replace('"llm"', '"words"').replace(
    ',\n         { name: "num_output_tokens" data_type: TYPE_UINT32 dims: -1 }', ""
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Any]:
    for name, config in (("llm", _CONFIG), ("words", _WORDS)):
        (tmp_path / f"models/{name}/1").mkdir(parents=True)
        (tmp_path / f"models/{name}/config.pbtxt").write_text(config)
        (tmp_path / f"models/{name}/1/model.py").write_text(_MODEL)
    limits = {"models": {"llm": {"output_tokens_per_minute": 6, "output_tokens_burst": 20}}}
    (tmp_path / "quotas.json").write_text(json.dumps({"anonymous": limits, "sharing": {"*": {}}}))
    with serve(
        tmp_path / "models", listen=True, plugin_options=[QuotaOptions(file=f"{tmp_path}/quotas.json")]
    ) as found:
        yield found


def streamed(server: Any, model: str) -> list[dict[str, Any]]:
    """Ask over a gRPC stream. Return the outputs of each response, or the error."""
    answers: queue.Queue[Any] = queue.Queue()
    tensor = grpc_client.InferInput("text_input", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"hello"], np.object_))
    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
        found = []
        while True:
            answer = answers.get(timeout=60)
            if not isinstance(answer, grpc_client.InferResult):
                found.append({"error": str(answer)})
                break
            response = answer.get_response()
            if response.parameters["triton_final_response"].bool_param and not response.outputs:
                break
            found.append({each.name: answer.as_numpy(each.name)[0] for each in response.outputs})
        client.stop_stream()
    return found


def test_a_model_reports_its_tokens_and_the_next_request_is_charged(server: Any) -> None:
    assert [each["num_output_tokens"] for each in streamed(server, "llm")] == [5, 5, 5]  # it did not request them
    generate = f"http://127.0.0.1:{server.options.http_port}/v2/models/llm/generate_stream"
    answer = httpx.post(generate, json={"text_input": "hello"})  # five of twenty are left
    assert answer.text.count('"num_output_tokens":5') == 3
    refused = httpx.post(generate, json={"text_input": "hello"})
    assert refused.status_code == 429
    assert refused.json() == {"error": "the address '127.0.0.1' with model 'llm' may have 6 output tokens per minute"}
    # Thirty of twenty are used, and ten seconds make one.
    assert 90 <= int(refused.headers["retry-after"]) <= 101
    assert "may have 6 output tokens per minute" in streamed(server, "llm")[0]["error"]
    assert len(streamed(server, "words")) == 3  # a model without a limit, each of whose responses counts as one token

    async def read() -> str:
        return text_format.text(server.engine.collect())

    page = on_loop(server, read())
    assert 'headrace_quotas_output_tokens_total{principal="anonymous"} 33' in page
    assert 'headrace_quotas_refused_total{reason="tokens",principal="anonymous"}' in page
    assert 'headrace_quotas_in_flight{principal="anonymous"} 0' in page


def test_a_token_bucket_may_go_into_debt_and_fills_at_its_rate(tmp_path: Path) -> None:
    filed = Filed(tmp_path, {"defaults": {"output_tokens_per_minute": 60, "output_tokens_burst": 10}})
    (caller,) = filed.ask()
    use = filed.quotas.table.uses["alice", "m"]
    assert use.total.tokens is not None
    use.total.tokens.take(25, filed.now_s)
    caller.end()
    assert filed.refuses().retry_after_s == pytest.approx(15)
    filed.now_s += 14.9
    filed.refuses()
    filed.now_s += 0.2
    filed.ask()
