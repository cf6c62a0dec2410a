"""The models and questions of ``settings.json``, and how it is recorded from a real Triton.

``python -m tests.extensions.trace.recorded DIRECTORY`` writes the repository, ``tritonserver
--model-repository=DIRECTORY --trace-config=triton,file=/tmp/tr/t.json --trace-config=level=OFF`` serves it, and
``python -m tests.extensions.trace.recorded HTTP_PORT GRPC_PORT`` sends the requests. ``triton.json`` is a trace file of
that server, one record a line: `TRACE_ALL` is set, then `infer_all` sends its requests.
"""

from __future__ import annotations

import http.client
import json
import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import httpx
import numpy as np
import tritonclient.grpc

from headrace import grpc_service_pb2 as pb

if TYPE_CHECKING:
    from tests.conftest import Headrace

RECORD = Path(__file__).with_name("settings.json")
ADDS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", value + 1)]))
        return answers
"""
CALLS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            x = pb_utils.Tensor("x", value.reshape(1, 2))
            asked = pb_utils.InferenceRequest(
                model_name="adds", requested_output_names=["y"], inputs=[x], trace=request.trace())
            found = asked.exec()
            answers.append(pb_utils.InferenceResponse([pb_utils.get_output_tensor_by_name(found, "y")]))
        return answers
"""
MANY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for _ in range(3):
                x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
FAILS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("no")) for request in requests]
"""
_TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 2 }\n'
_STEPS = """ensemble_scheduling {
  step { model_name: "adds" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "z" } }
  step { model_name: "adds" model_version: -1 input_map { key: "x" value: "z" } output_map { key: "y" value: "y" } }
}
"""
MODELS = {
    "adds": ('backend: "python"\nmax_batch_size: 8\ndynamic_batching { }\n', ADDS),
    "calls": ('backend: "python"\n', CALLS),
    "many": ('backend: "python"\nmodel_transaction_policy { decoupled: true }\n', MANY),
    "fails": ('backend: "python"\n', FAILS),
    "twice": (f'platform: "ensemble"\nmax_batch_size: 8\n{_STEPS}', None),
}  # fmt: skip


def write_repository(root: Path) -> None:
    for name, (config, code) in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        group = "" if code is None else "instance_group { kind: KIND_CPU }\n"
        (root / name / "config.pbtxt").write_text(config + group + _TENSORS)
        if code is not None:
            (root / name / "1/model.py").write_text(code)


def write_adds(root: Path) -> Path:
    """Write ``adds`` as a model that runs in the server's process. Return ``root``."""
    (root / "adds/1").mkdir(parents=True)
    config = MODELS["adds"][0].replace('"python"', '"identity"')
    (root / "adds/config.pbtxt").write_text(config + _TENSORS)
    return root


def ask(port: int, path: str, body: Any) -> tuple[int, Any]:
    """Return status and body of an answer over HTTP: a document, or the text if it is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, body if isinstance(body, str) else json.dumps(body))
        answer = connection.getresponse()
        text = answer.read().decode()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text
    finally:
        connection.close()


def call(port: int, model: str, settings: dict[str, list[str]]) -> tuple[str, Any]:
    """Return the code of an answer over gRPC, and the settings or the error's text."""
    request = pb.TraceSettingRequest(model_name=model)
    for name, values in settings.items():
        request.settings[name].value.extend(values)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.unary_unary(
            "/inference.GRPCInferenceService/TraceSetting",
            pb.TraceSettingRequest.SerializeToString,
            pb.TraceSettingResponse.FromString,
        )
        try:
            answer = method(request, timeout=20)
        except grpc.RpcError as error:
            return error.code().name, error.details()
        return "OK", {name: list(setting.value) for name, setting in sorted(answer.settings.items())}


def record(http_port: int, grpc_port: int) -> dict[str, Any]:
    """Return the questions of ``settings.json``, in order, with the answers of a server that was just started.

    Over HTTP: path, body (None for GET), status and answer. Over gRPC: model, settings, code and answer.
    """
    questions = json.loads(RECORD.read_text())
    http_answers = [[path, body, *ask(http_port, path, body)] for path, body, *_ in questions["http"]]
    called = [[model, settings, *call(grpc_port, model, settings)] for model, settings, *_ in questions["grpc"]]
    return {"http": http_answers, "grpc": called}


def counters(server: Headrace) -> dict[str, float]:
    """Return what ``server`` counts of traces."""
    page = httpx.get(f"http://127.0.0.1:{server.ports['Metrics Service']}/metrics").text
    found = (line.split() for line in page.splitlines() if line.startswith("headrace_trace_"))
    return {words[0].partition("{")[0]: float(words[-1]) for words in found}


TRACE_ALL = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1"}
_SHAPES = {"adds": [1, 2], "calls": [2], "fails": [2], "twice": [1, 2], "many": [2]}


def infer_all(http_port: int, grpc_port: int) -> None:
    """Send the requests of ``triton.json``, one after the other."""
    for name in ("adds", "calls", "fails", "twice"):
        ask(http_port, f"/v2/models/{name}/infer", {"id": f"h-{name}", **_body(name)})
    ask(http_port, "/v2/models/adds/infer", _body("adds"))
    answers: queue.Queue[Any] = queue.Queue()
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as client:
        for name in ("adds", "twice", "fails"):
            try:
                client.infer(name, _inputs(name), request_id=f"g-{name}")
            except tritonclient.grpc.InferenceServerException as error:
                if name != "fails":
                    raise error from None
        client.start_stream(lambda result, error: answers.put((result, error)))
        for name, count in (("many", 3), ("adds", 1)):
            client.async_stream_infer(name, _inputs(name), request_id=f"s-{name}")
            for _ in range(count):
                answers.get(timeout=20)
        client.stop_stream()


def infer_adds(http_port: int, count: int = 12) -> None:
    """Send ``count`` requests to ``adds``, which it answers."""
    for _ in range(count):
        assert ask(http_port, "/v2/models/adds/infer", _body("adds"))[0] == 200


def _body(name: str) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": _SHAPES[name], "datatype": "FP32", "data": [1, 2]}]}


def _inputs(name: str) -> list[Any]:
    x = tritonclient.grpc.InferInput("x", _SHAPES[name], "FP32")
    x.set_data_from_numpy(np.array([1, 2], np.float32).reshape(_SHAPES[name]))
    return [x]


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write_repository(Path(sys.argv[1]))
    else:
        found = record(int(sys.argv[1]), int(sys.argv[2]))
        parts = [f'"{name}": [\n' + ",\n".join(map(json.dumps, answers)) + "\n]" for name, answers in found.items()]
        RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n")
