"""The questions of ``answers.json``, and how it is recorded from a real Triton 2.51.

``python -m tests.frontends.cloud_routes.recorded write DIRECTORY`` writes the repository of `write_repository` and
``/opt/ml/models``. Then ``tritonserver --model-repository=DIRECTORY --allow-sagemaker=true --allow-vertex-ai=true
--vertex-ai-port=8081 --model-control-mode=explicit --load-model=echo`` serves it, with
``SAGEMAKER_TRITON_DEFAULT_MODEL_NAME=echo``, ``AIP_PREDICT_ROUTE=/predict`` and ``AIP_HEALTH_ROUTE=/health``, and
``python -m tests.frontends.cloud_routes.recorded ask SAGEMAKER_PORT VERTEX_AI_PORT`` asks.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Mapping
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

RECORD = Path(__file__).with_name("answers.json")
ROOT = "/opt/ml/models"
CONFIG = """
max_batch_size: 4
input { name: "INPUT0" data_type: TYPE_FP32 dims: [2] }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: [2] }
instance_group { kind: KIND_CPU }
"""
PYTHON = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)]) for array in arrays]
"""
INFER = '{"id":"x","inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"data":[1,2]}]}'
_HEAD = (
    '{"inputs":[{"name":"INPUT0","datatype":"FP32","shape":[1,2],"parameters":{"binary_data_size":8}}],'
    '"outputs":[{"name":"OUTPUT0","parameters":{"binary_data":true}}]}'
)
BINARY = _HEAD + struct.pack("<ff", 3, 4).decode("latin-1")
SAGEMAKER = "application/vnd.sagemaker-triton.binary+json"
VERTEX_AI = "application/vnd.vertex-ai-triton.binary+json"
#: What the header of Vertex AI may say.
REDIRECTS = (
    "v2/models/echo/infer", "v2", "v2/models/echo", "v2/models/echo/ready", "v2/models/echo/versions/1/ready",
    "v2/health/live", "v2/health/ready", "v2/repository/index", "v2/systemsharedmemory/status", "/v2", "v2/logging",
    "v2/trace/setting", "nope", "v2/models/echo/generate", "v2/models/nope", "v2/models/nope/infer", "v2/models/../x",
)  # fmt: skip


class Answer(NamedTuple):
    status: int
    content_type: str
    length: str
    answer: str


def questions() -> list[dict[str, Any]]:
    """Return each request: its port, method, path, headers and body, in latin-1."""
    length = len(_HEAD)
    asked = [
        *(("sagemaker", method, "/ping", {}, "") for method in ("GET", "POST")),
        *(("sagemaker", method, "/nope", {}, "") for method in ("GET", "POST")),
        ("sagemaker", "POST", "/invocations", {}, INFER),
        ("sagemaker", "GET", "/invocations", {}, ""),
        ("sagemaker", "POST", "/invocations", {}, "x"),
        ("sagemaker", "GET", "/v2", {}, ""),
        *(("sagemaker", "POST", "/invocations", {"Content-Type": f"{SAGEMAKER};json-header-size={size}"}, BINARY)
          for size in (length, 99999, -1)),
        ("sagemaker", "GET", "/models", {}, ""),
        ("sagemaker", "PUT", "/models", {}, ""),
        ("sagemaker", "GET", "/models/a", {}, ""),
        ("sagemaker", "DELETE", "/models/a", {}, ""),
        ("sagemaker", "POST", "/models/echo/invoke", {}, INFER),
        ("sagemaker", "GET", "/models/a/invoke", {}, ""),
        ("sagemaker", "PUT", "/models/a/invoke", {}, ""),
        *(("sagemaker", "POST", "/models", {}, body) for body in (
            "{}", '{"model_name":"a"}', load("a", "/tmp/x"), load("a", "/proc/self"), load("a", f"{ROOT}/none/model"),
            load("a", f"{ROOT}/abc/model"))),
        ("sagemaker", "GET", "/models/b", {}, ""),
        ("sagemaker", "POST", "/models/a/invoke", {}, INFER),
        ("sagemaker", "POST", "/models/a/invoke", {"X-Amzn-SageMaker-Target-Model": "echo"}, INFER),
        ("sagemaker", "POST", "/models", {}, load("a", f"{ROOT}/abc/model")),
        ("sagemaker", "POST", "/models", {}, load("b", f"{ROOT}/abc/model")),
        ("sagemaker", "POST", "/models", {}, load("c", f"{ROOT}/two/model")),
        ("sagemaker", "POST", "/models", {}, load("n", f"{ROOT}/named/model")),
        ("sagemaker", "POST", "/models/n/invoke", {}, INFER),
        *(("sagemaker", "DELETE", "/models/" + name, {}, "") for name in ("n", "c", "a", "a")),
        ("sagemaker", "GET", "/models/a", {}, ""),
        *(("vertex_ai", method, path, {}, "") for method in ("GET", "POST") for path in ("/health", "/nope")),
        ("vertex_ai", "GET", "/predict", {}, ""),
        ("vertex_ai", "POST", "/predict", {}, INFER),
        ("vertex_ai", "POST", "/predict", {}, "x"),
        *(("vertex_ai", "POST", "/predict", {"Content-Type": f"{VERTEX_AI};json-header-size={size}"}, BINARY)
          for size in (length, 99999, -1)),
        *(("vertex_ai", "POST", "/predict", {"X-Vertex-Ai-Triton-Redirect": path},
           INFER if path.endswith("/infer") else "") for path in REDIRECTS),
    ]  # fmt: skip
    keys = ("port", "method", "path", "headers", "body")
    return [dict(zip(keys, each, strict=True)) for each in asked]


def load(name: str, url: str) -> str:
    return json.dumps({"model_name": name, "url": url})


def ask(port: int, question: Mapping[str, Any]) -> Answer:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(
            question["method"], question["path"], question["body"].encode("latin-1"), dict(question["headers"])
        )
        reply = connection.getresponse()
        return Answer(
            reply.status,
            reply.getheader("Content-Type") or "",
            reply.getheader("Inference-Header-Content-Length") or "",
            reply.read().decode("latin-1"),
        )
    finally:
        connection.close()


def write_repository(root: Path, shared: Path, backend: str) -> None:
    """Write the model ``echo`` to ``root``, and SageMaker's models to ``shared``."""
    named = 'name: "other"\n'
    for folder, more in ((root / "echo", ""), (shared / "abc/model", ""), (shared / "two/model/sub", ""),
                         (shared / "named/model", named)):  # fmt: skip
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(f'{more}backend: "{backend}"\n{CONFIG}')
        if backend == "python":
            (folder / "1/model.py").write_text(PYTHON)


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_repository(Path(sys.argv[2]), Path(ROOT), "python")
    else:
        ports = dict(zip(("sagemaker", "vertex_ai"), map(int, sys.argv[2:]), strict=True))
        lines = [json.dumps({**each, **ask(ports[each["port"]], each)._asdict()}) for each in questions()]
        RECORD.write_text("".join(("[\n", ",\n".join(lines), "\n]\n")))
