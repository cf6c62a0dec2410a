"""The questions of ``shm.json``, and how it is recorded from a real Triton.

``python -m tests.extensions.shm.recorded DIRECTORY`` writes the repository, ``tritonserver
--model-repository=DIRECTORY`` serves it, and ``python -m tests.extensions.shm.recorded HTTP_PORT GRPC_PORT`` sends
them. The order matters: later requests use regions that earlier ones have registered. ``KEY`` stands for the key of a
segment of `Segments`, without the leading slash.
"""

from __future__ import annotations

import http.client
import json
import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict, ParseDict

from headrace import grpc_service_pb2 as pb

RECORD = Path(__file__).with_name("shm.json")
QUESTIONS: list[dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else []
#: The record. Where Headrace's answer differs, the entry has it as ``ours``, with the reason as ``why``.
ANSWER = ("status", "type", "answer", "written")
SIZE = 8192
#: Model, type and backend of Headrace for the same config.
MODELS = {"numbers": "TYPE_FP32", "texts": "TYPE_STRING"}
IDENTITY = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]) for each in requests]
"""


def write_repository(root: Path, backend: str = "python") -> None:
    for name, kind in MODELS.items():
        (root / name / "1").mkdir(parents=True)
        (root / name / "1/model.py").write_text(IDENTITY)
        tensors = "".join(
            f'{way} {{ name: "{tensor}" data_type: {kind} dims: [-1] }}\n'
            for way, tensor in (("input", "x"), ("output", "y"))
        )
        (root / name / "config.pbtxt").write_text(
            f'backend: "{backend}"\ninstance_group {{ kind: KIND_CPU }}\n{tensors}'
        )


class Segments:
    """A segment of `SIZE` bytes, which begins with eight floats and, at 4096, with two strings."""

    def __enter__(self) -> Segments:
        self.segment = SharedMemory(create=True, size=SIZE)
        self.reset()
        return self

    def reset(self) -> None:
        content = bytearray(SIZE)
        content[:32] = b"".join(bytes([0, 0, 128, 63 + number]) for number in range(8))
        content[4096:4107] = b"\3\0\0\0abc\0\0\0\0"
        self.buffer[:SIZE] = content

    @property
    def buffer(self) -> memoryview:
        found = self.segment.buf
        assert found is not None
        return found

    @property
    def key(self) -> str:
        return self.segment.name.lstrip("/")

    def __exit__(self, *error: object) -> None:
        self.segment.close()
        self.segment.unlink()

    def ask(self, question: dict[str, Any], http_port: int, grpc_port: int) -> dict[str, Any]:
        """Return the answer, and what has become of the segment if that has changed."""
        self.reset()
        before = bytes(self.buffer[:SIZE])
        answer = (
            ask_grpc(grpc_port, question, self.key) if "rpc" in question else ask_http(http_port, question, self.key)
        )
        after = bytes(self.buffer[:SIZE])
        if after != before:
            changed = [at for at in range(SIZE) if after[at] != before[at]]
            answer["written"] = [changed[0], after[changed[0] : changed[-1] + 1].hex()]
        return answer


def ask_http(port: int, question: dict[str, Any], key: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = question.get("body")
    text = body if isinstance(body, str) or body is None else json.dumps(body)
    try:
        connection.request(
            question["method"], question["path"], None if text is None else text.replace("KEY", key).encode()
        )
        reply = connection.getresponse()
        content = reply.read().decode("utf-8", "backslashreplace").replace(key, "KEY")
        try:
            answer = json.loads(content)
        except ValueError:
            answer = content
        return {"status": reply.status, "type": reply.getheader("Content-Type") or "", "answer": answer}
    finally:
        connection.close()


def ask_grpc(port: int, question: dict[str, Any], key: str) -> dict[str, Any]:
    name = question["rpc"]
    request = getattr(pb, f"{name}Request")()
    ParseDict(json.loads(json.dumps(question["request"]).replace("KEY", key)), request)
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary(
            f"/inference.GRPCInferenceService/{name}",
            type(request).SerializeToString,
            getattr(pb, f"{name}Response").FromString,
        )
        try:
            answer = MessageToDict(call(request, timeout=20), preserving_proto_field_name=True)
        except grpc.RpcError as error:
            return {"status": error.code().name, "answer": str(error.details()).replace(key, "KEY")}
    return {"status": "OK", "answer": json.loads(json.dumps(answer).replace(key, "KEY"))}


if __name__ == "__main__":
    if not sys.argv[1].isdigit():
        write_repository(Path(sys.argv[1]))
    else:
        with Segments() as segments:
            for each in QUESTIONS:
                answers = {
                    name: value for name, value in each.items() if name not in ("status", "type", "answer", "written")
                }
                each.clear()
                each.update(answers | segments.ask(answers, int(sys.argv[1]), int(sys.argv[2])))
        RECORD.write_text("".join(("[\n", ",\n".join(map(json.dumps, QUESTIONS)), "\n]\n")))
