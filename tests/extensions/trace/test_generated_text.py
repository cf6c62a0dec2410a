"""Traces of a model that generates text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from tests.extensions.trace.collector import collecting

if TYPE_CHECKING:
    from tests.conftest import Headrace

CONFIG = """backend: "python" model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
output { name: "text_output" data_type: TYPE_STRING dims: 1 }
output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: 1 }
output { name: "num_output_tokens" data_type: TYPE_UINT32 dims: 1 }
parameters { key: "isolation" value { string_value: "thread" } }
"""
WRITER = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for count, pause_s in ((1, 0.02), (2, 0.1), (1, 0.1)):
                time.sleep(pause_s)
                outputs = {"text_output": np.array([b"word"], object), "num_input_tokens": np.array([5], np.uint32),
                           "num_output_tokens": np.array([count], np.uint32)}
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in outputs.items()]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def test_a_span_has_the_parts_the_tokens_and_the_time_to_the_first(
    serve: Callable[..., Headrace], tmp_path: Path
) -> None:
    (tmp_path / "writer/1").mkdir(parents=True)
    (tmp_path / "writer/1/model.py").write_text(WRITER)
    (tmp_path / "writer/config.pbtxt").write_text(CONFIG)
    with collecting() as collector:
        settings = ("mode=opentelemetry", f"opentelemetry,url={collector.url}", "level=TIMESTAMPS", "rate=1")
        server = serve(f"--model-repository={tmp_path}", *(f"--trace-config={setting}" for setting in settings))
        url = f"http://127.0.0.1:{server.http}/v2/models/writer/generate_stream"
        assert httpx.post(url, json={"text_input": "Once"}).text.count("data:") == 3
        server.stop()
        (span,) = [span for span in collector.spans if span.name == "writer"]
    assert span.events == ["REQUEST_START", "QUEUE_START", "FIRST_RESPONSE", "REQUEST_END"]
    assert 20 <= float(span.attributes["headrace.text.first_part_ms"]) < (span.end_ns - span.begin_ns) / 1e6 - 100
    assert span.attributes["headrace.text.parts"] == "3"
    assert span.attributes["gen_ai.usage.input_tokens"] == "5"
    assert span.attributes["gen_ai.usage.output_tokens"] == "4"
