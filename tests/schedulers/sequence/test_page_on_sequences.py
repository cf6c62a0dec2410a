"""The examples of docs/sequences.md: its client, its states and its generating model."""

from __future__ import annotations

import queue
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from headrace import Server
from headrace_testing.serving import serve

PAGE = (Path(__file__).parents[3] / "docs/sequences.md").read_text()
(CLIENT, GENERATING) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(STATE, ITERATIVE) = re.findall(r"```\n((?:sequence_batching|model_transaction_policy) .*?)```", PAGE, re.DOTALL)

COMMON = 'backend: "python" parameters { key: "isolation" value { string_value: "thread" } }\n'
SUM = (
    COMMON
    + """max_batch_size: 2
input { name: "x" data_type: TYPE_FP32 dims: 64 } output { name: "y" data_type: TYPE_FP32 dims: 64 }
"""
    + STATE
)
SUM_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.sum(request) for request in requests]

    def sum(self, request):
        x, h = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in "xh")
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x + h), pb_utils.Tensor("h_next", x + h)])
"""
#: Says the letters of its prompt, one by one.
SPELL = (
    COMMON
    + """max_batch_size: 4
input { name: "prompt" data_type: TYPE_STRING dims: 1 } output { name: "letter" data_type: TYPE_STRING dims: 1 }
"""
    + ITERATIVE
)
SPELL_MODEL = (
    "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n"
    + GENERATING.replace("class TritonPythonModel", "class AsShown")
    + """
class TritonPythonModel(AsShown):
    def initialize(self, args):
        self.left = {}

    def next_token(self, request):
        id = request.correlation_id()
        if pb_utils.get_input_tensor_by_name(request, "START").as_numpy().item():
            prompt = pb_utils.get_input_tensor_by_name(request, "prompt").as_numpy().item()
            self.left[id] = list(prompt.decode())
        letter = np.array([[self.left[id].pop(0)]], object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("letter", letter)]), not self.left[id]
"""
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    for name, config, code in (("sum", SUM, SUM_MODEL), ("spell", SPELL, SPELL_MODEL)):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
        (repository / name / "1/model.py").write_text(code)
    with serve(repository, listen=True) as running:
        yield running


def test_the_documented_client_and_state_sum_a_sequence(server: Server) -> None:
    x = tritonclient.http.InferInput("x", [1, 64], "FP32")
    x.set_data_from_numpy(np.arange(64, dtype=np.float32).reshape(1, 64))
    answers: list[list[float]] = []

    class Client(tritonclient.http.InferenceServerClient):  # type: ignore[misc]  # untyped
        def infer(self, *args: Any, **options: Any) -> None:
            answers.append(super().infer(*args, **options).as_numpy("y").ravel().tolist())

    with Client(f"127.0.0.1:{server.options.http_port}") as client:
        for _ in range(2):  # the second time it starts from zero again
            exec(CLIENT, {"client": client, "inputs": [x]})
    assert answers == [[float(step * n) for n in range(64)] for step in (1, 2, 3)] * 2


def test_the_model_of_the_page_generates_for_many_at_once(server: Server) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    prompts = ["headrace", "triton", "a", "sequences"]
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number, prompt in enumerate(prompts):
            tensor = tritonclient.grpc.InferInput("prompt", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[prompt]], object))
            client.async_stream_infer("spell", [tensor], request_id=str(number))
        texts = [""] * len(prompts)
        for _ in range(sum(map(len, prompts))):
            answer = answers.get(timeout=90)
            assert not isinstance(answer, Exception), answer
            texts[int(answer.get_response().id)] += answer.as_numpy("letter").item().decode()
        client.stop_stream()
    assert texts == prompts
