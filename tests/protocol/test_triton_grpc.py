"""A real Triton's answers to the same gRPC calls, recorded in ``triton_grpc.json``.

As in ``test_triton.py``, a question that is answered otherwise here carries its ``deviation``, and
``python tests/protocol/test_triton_grpc.py PORT`` records anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import text_format
from tritonclient.grpc import service_pb2, service_pb2_grpc

if TYPE_CHECKING:
    from tests.conftest import Headrace

RECORD = Path(__file__).with_name("triton_grpc.json")
QUESTIONS: list[dict[str, Any]] = json.loads(RECORD.read_text())


@pytest.fixture(scope="module")
def stub(identity_of_triton: Headrace) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{identity_of_triton.grpc}") as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def ask(stub: Any, question: dict[str, Any]) -> tuple[str, str]:
    """Status and, in text format, the response or the responses; or the details of an error."""
    kind = getattr(service_pb2, f"{question['rpc'].replace('Stream', '')}Request")
    requests = [text_format.Parse(text, kind()) for text in question["requests"]]
    call: Callable[..., Any] = getattr(stub, question["rpc"])
    try:
        answers = call(iter(requests)) if "Stream" in question["rpc"] else [call(requests[0])]
        return "OK", "\n".join(text_format.MessageToString(answer, as_one_line=True) for answer in answers)
    except grpc.RpcError as error:
        return error.code().name, error.details() or ""


@pytest.mark.parametrize(
    "question", QUESTIONS, ids=[f"{index}-{question['rpc']}" for index, question in enumerate(QUESTIONS)]
)
def test_headrace_answers_as_triton_does_or_has_a_reason(stub: Any, question: dict[str, Any]) -> None:
    answer = ask(stub, question)
    recorded = question["status"], question["answer"]
    if "deviation" in question:
        assert answer != recorded, "it does not deviate any more"
    else:
        assert answer == recorded


if __name__ == "__main__":
    with grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}") as triton:
        for question in QUESTIONS:
            question["status"], question["answer"] = ask(service_pb2_grpc.GRPCInferenceServiceStub(triton), question)
    RECORD.write_text("".join(("[\n", ",\n".join(map(json.dumps, QUESTIONS)), "\n]\n")))
