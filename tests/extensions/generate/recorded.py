"""The models and questions of ``generate.json``, and how it is recorded from a real Triton.

``python -m tests.extensions.generate.recorded DIRECTORY`` writes the repository, ``tritonserver
--model-repository=DIRECTORY`` serves it, and ``python -m tests.extensions.generate.recorded PORT`` asks.
"""

from __future__ import annotations

import http.client
import json
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("generate.json")
QUESTIONS: list[dict[str, Any]] = json.loads(RECORD.read_text())
TYPES = "BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 FP16 FP32 FP64 BF16 STRING".split()  # noqa: SIM905
SHAPES = {"one": "1", "two": "2", "any": "-1", "fixed": "2, 3", "right": "2, -1", "left": "-1, 2", "both": "-1, -1"}
#: The outputs of the model ``values``, one for each value of its input.
KINDS = {
    "bool": "BOOL", "int64": "INT64", "uint64": "UINT64", "fp32": "FP32", "fp64": "FP64", "nan": "FP32",
    "fp16": "FP16", "empty": "INT32", "matrix": "INT32", "text": "STRING", "bad": "STRING",
}  # fmt: skip
#: Answers with what it was asked.
SEEN = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            seen = {}
            for tensor in request.inputs():
                array = tensor.as_numpy()
                values = array.ravel().tolist()
                values = [each.decode("latin-1") if isinstance(each, bytes) else each for each in values]
                seen[tensor.name()] = [str(array.dtype), list(array.shape), values]
            said = {"inputs": seen, "parameters": json.loads(request.parameters()), "id": request.request_id(),
                    "sequence": request.correlation_id(), "flags": request.flags(),
                    "outputs": sorted(request.requested_output_names())}
            text = np.array([json.dumps(said, sort_keys=True).encode()], np.object_)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("SEEN", text.reshape(BATCH))]))
        return answers
"""
#: Gives as many responses as N says; for a negative N, the last is an error.
MANY = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            count = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy().ravel()[0])
            for index in range(abs(count)):
                if count < 0 and index == -count - 1:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("oh no")))
                else:
                    text = np.array([("w%d \\n\\u00e9\\"" % index).encode()], np.object_)
                    numbers = np.arange(index + 1, dtype=np.float32) / 3
                    sender.send(pb_utils.InferenceResponse(
                        [pb_utils.Tensor("TEXT", text), pb_utils.Tensor("NUMBERS", numbers)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
#: Sends an error between two responses.
STUMBLES = MANY.replace("abs(count)", "3").replace("count < 0 and index == -count - 1", "index == 1")
VALUES = """
import numpy as np
import triton_python_backend_utils as pb_utils

VALUES = {
    "bool": np.array([True, False]),
    "int64": np.array([-2**63, 2**63 - 1], np.int64),
    "uint64": np.array([2**64 - 1], np.uint64),
    "fp32": np.array([0.1, 1e30, -0.0, 3], np.float32),
    "fp64": np.array([0.1, 1e300, 5e-324, 1e16, 12345678.9], np.float64),
    "nan": np.array([np.nan, np.inf, -np.inf], np.float32),
    "fp16": np.array([1.5], np.float16),
    "empty": np.zeros([0], np.int32),
    "matrix": np.arange(6, dtype=np.int32).reshape(2, 3),
    "text": np.array([b"a", "\\u00e9\\u4e16".encode(), b"q\\"\\\\/\\x00\\x1f\\x7f", b""], np.object_),
    "bad": np.array([b"\\xff\\xfe"], np.object_),
}

class TritonPythonModel:
    def execute(self, requests):
        kinds = [pb_utils.get_input_tensor_by_name(each, "KIND").as_numpy().ravel()[0].decode() for each in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT_" + kind, VALUES[kind])]) for kind in kinds]
"""


def write_repository(root: Path) -> None:
    seen = _outputs({"SEEN": "STRING"}, "1")
    shaped = "".join(_input(name, "INT32", dims) for name, dims in SHAPES.items())
    row, rows = SEEN.replace("BATCH", "1"), SEEN.replace("BATCH", "1, 1")
    _model(root, "seen", "".join(_input(kind, kind, "-1") for kind in TYPES) + seen, row)
    _model(root, "shapes", shaped + seen, row)
    _model(root, "batched", "max_batch_size: 8\n" + shaped + seen, rows)
    _model(root, "seq", "max_batch_size: 8\nsequence_batching { }\n" + _input("N", "INT32", "1") + seen, rows)
    _model(root, "collide", _input("parameters", "INT32", "-1") + _input("id", "INT32", "-1") + seen, row)
    many = _outputs({"TEXT": "STRING"}, "1") + _outputs({"NUMBERS": "FP32"}, "-1")
    needed = _input("N", "INT32", "1").replace("optional: true", "")
    _model(root, "many", "model_transaction_policy { decoupled: true }\n" + needed + many, MANY)
    _model(root, "stumbles", "model_transaction_policy { decoupled: true }\n" + needed + many, STUMBLES)
    outputs = {f"OUT_{name}": kind for name, kind in KINDS.items() if name != "matrix"}
    values = _outputs(outputs, "-1") + _outputs({"OUT_matrix": "INT32"}, "-1, -1")
    _model(root, "values", _input("KIND", "STRING", "1") + values, VALUES)


def _model(root: Path, name: str, config: str, code: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1/model.py").write_text(code)
    (root / name / "config.pbtxt").write_text(f'backend: "python"\ninstance_group {{ kind: KIND_CPU }}\n{config}')


def _input(name: str, kind: str, dims: str) -> str:
    return f'input {{ name: "{name}" data_type: TYPE_{kind} dims: [{dims}] optional: true }}\n'


def _outputs(kinds: dict[str, str], dims: str) -> str:
    return "".join(
        f'output {{ name: "{name}" data_type: TYPE_{kind} dims: [{dims}] }}\n' for name, kind in kinds.items()
    )


def ask(port: int, question: dict[str, Any]) -> tuple[int, str, str]:
    """Return status, media type and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = question["body"]
    try:
        connection.request(
            question["method"], question["path"], None if body is None else body.encode(), question.get("headers", {})
        )
        answer = connection.getresponse()
        media_type = (answer.getheader("Content-Type") or "").partition(";")[0]
        return answer.status, media_type, answer.read().decode("utf-8", "backslashreplace")
    finally:
        connection.close()


if __name__ == "__main__":
    if not sys.argv[1].isdigit():
        write_repository(Path(sys.argv[1]))
    else:
        for question in QUESTIONS:
            question["status"], question["type"], question["answer"] = ask(int(sys.argv[1]), question)
        RECORD.write_text("".join(("[\n", ",\n".join(map(json.dumps, QUESTIONS)), "\n]\n")))
