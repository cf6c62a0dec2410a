"""Bodies that are much to read: bombs, and documents and messages made of as many parts as fit.

One peer sends each of them once or a few times. Whatever the answer is, no other caller waits.
"""

from __future__ import annotations

import base64
import gzip
import http.client
import json
import socket
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

if TYPE_CHECKING:
    from tests.conftest import Headrace

    Attack = Callable[[Headrace], AbstractContextManager[None]]

MIB = 1 << 20
#: --http-max-input-size and --grpc-max-decompressed-size, by default.
LIMIT = 64 * MIB
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"


def post(server: Headrace, body: bytes, path: str = "/v2/models/huge/infer", **headers: str) -> tuple[int, bytes]:
    """Status and body of the answer; header names have underscores."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=120)
    try:
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def call(
    server: Headrace, message: bytes, method: str = MODEL_INFER, compression: Any = None
) -> tuple[grpc.StatusCode, bytes]:
    """Status and answer of a unary gRPC call with ``message``."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}", options) as channel:
        try:
            answer: bytes = channel.unary_unary(method, _same, _same)(message, timeout=120, compression=compression)
        except grpc.RpcError as error:
            return error.code(), str(error.details()).encode()
        return grpc.StatusCode.OK, answer


def _same(message: bytes) -> bytes:
    return message


def bomb(size_bytes: int, wbits: int = 31) -> bytes:
    """Return zeros compressed to a thousandth of their size."""
    packer = zlib.compressobj(9, wbits=wbits)
    return b"".join(packer.compress(bytes(16 * MIB)) for _ in range(size_bytes // (16 * MIB))) + packer.flush()


def document(data: bytes, datatype: str = "UINT8", count: int = 1) -> bytes:
    head = b'{"inputs":[{"name":"IN","datatype":"%s","shape":[%d],"data":' % (datatype.encode(), count)
    return head + data + b"}]}"


def repeated(first: bytes, more: bytes, size_bytes: int) -> bytes:
    return first + more * ((size_bytes - len(first)) // len(more))


@pytest.fixture(scope="session")
def mib(is_judged: bool) -> int:
    """The bytes of a mebibyte, of which a plain run takes a quarter."""
    return MIB if is_judged else MIB // 4


#: Functions of the bytes of a mebibyte, because the bodies together are half a gigabyte, and a plain run has smaller
#: ones.
JSON_BODIES: dict[str, Callable[[int], bytes]] = {
    "a string that does not end": lambda mib: b'[NaN,"' + b'\\"' * (MIB // 2),
    "quotes behind NaN": lambda mib: b"NaN" + b'\\"' * (MIB // 2),
    "empty arrays": lambda mib: document(b"[" + repeated(b"[]", b",[]", 32 * mib) + b"]"),
    "arrays of one": lambda mib: document(b"[" + repeated(b"[1]", b",[1]", 32 * mib) + b"]", count=8 * mib),
    "empty objects": lambda mib: document(b"[" + repeated(b"{}", b",{}", 32 * mib) + b"]"),
    "strings": lambda mib: document(b"[" + repeated(b'""', b',""', 32 * mib) + b"]"),
    "not a tensor": lambda mib: b'{"id":[' + repeated(b"[]", b",[]", 32 * mib) + b"]}",
    "members": lambda mib: b'{"a":1' + b"".join(b',"%d":1' % number for number in range(2 * mib)) + b"}",
    "numbers": lambda mib: document(b"[" + repeated(b"0", b",0", 64 * mib - 200) + b"]", count=(64 * mib - 199) // 2),
    "deep": lambda mib: b"[" * (32 * mib) + b"]" * (32 * mib),
    "deep and open": lambda mib: b"[" * (48 * mib),
    "nested unevenly": lambda mib: document(b"[" + repeated(b"1", b",[[[[1]],2]]", 32 * mib) + b"]"),
    "inputs": lambda mib: b'{"inputs":[' + repeated(b"{}", b",{}", 32 * mib) + b"]}",
    "one long string": lambda mib: document(b'["' + b"a" * (48 * mib) + b'"]'),
    "escapes": lambda mib: document(b'["' + b"\\u0041" * (8 * mib) + b'"]'),
}


@pytest.mark.parametrize("body", list(JSON_BODIES))
def test_json(attacked: Headrace, under_attack: Attack, body: str, mib: int) -> None:
    sent = JSON_BODIES[body](mib)
    with under_attack(attacked):
        status, answer = post(attacked, sent)
    assert status in (200, 400, 500), answer
    assert status == 200 or json.loads(answer)["error"]


@pytest.mark.parametrize("body", ["quotes behind NaN", "not a tensor", "members", "deep", "deep and open"])
@pytest.mark.parametrize("path", ["index", "models/huge/load", "models/huge/unload"])
def test_json_elsewhere(attacked_natively: Headrace, under_attack: Attack, path: str, body: str, mib: int) -> None:
    sent = JSON_BODIES[body](mib)
    with under_attack(attacked_natively):
        status, answer = post(attacked_natively, sent, f"/v2/repository/{path}")
    assert status in (400, 500)
    assert json.loads(answer)["error"]


def test_gzip_over_http(attacked: Headrace, under_attack: Attack, mib: int) -> None:
    """Three at a time, of a gibibyte each."""
    packed = bomb(1024 * mib)
    with under_attack(attacked), ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda _: post(attacked, packed, Content_Encoding="gzip"), range(3)))
    assert {status for status, _ in answers} == {400}
    assert b"Decompressed data size exceeds the maximum allowed value of 67108864 bytes" in answers[0][1]


def test_gzip_of_what_is_hard_to_read(attacked: Headrace, under_attack: Attack, mib: int) -> None:
    bodies = [gzip.compress(JSON_BODIES[name](mib), 1) for name in ("empty arrays", "arrays of one", "not a tensor")]
    with under_attack(attacked), ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda body: post(attacked, body, Content_Encoding="gzip"), bodies))
    assert [status for status, _ in answers] == [400, 200, 400], [answer[:200] for _, answer in answers]


def test_gzip_of_many_strings(attacked: Headrace, under_attack: Attack, mib: int) -> None:
    """Each string of a tensor is looked for, wherever it lies."""
    count = 15 * mib
    head = json.dumps({"inputs": [
        {"name": "IN", "datatype": "BYTES", "shape": [count], "parameters": {"binary_data_size": 4 * count}}
    ]}).encode()  # fmt: skip
    body = gzip.compress(head + bytes(4 * count), 1)
    with under_attack(attacked):
        status, answer = post(attacked, body, Content_Encoding="gzip", Inference_Header_Content_Length=str(len(head)))
    assert (status, b"data-type is 'BYTES'" in answer) == (400, True)


def raw(size_bytes: int, **parameters: Any) -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [size_bytes], "parameters": {"binary_data_size": size_bytes}}
    head = json.dumps({"inputs": [tensor], **parameters}).encode()
    return head + bytes(size_bytes), {"Inference_Header_Content_Length": str(len(head))}


def test_an_answer_to_be_compressed(attacked: Headrace, under_attack: Attack) -> None:
    noise = np.random.default_rng(1).integers(0, 64, 16 * MIB, np.uint8).tobytes()
    body, headers = raw(16 * MIB, parameters={"binary_data_output": True})
    body = body[: -16 * MIB] + noise
    with under_attack(attacked):
        status, answer = post(attacked, body, Accept_Encoding="gzip", **headers)
    assert status == 200
    assert gzip.decompress(answer).endswith(noise)


def test_an_answer_to_be_printed(attacked: Headrace, under_attack: Attack) -> None:
    body, headers = raw(16 * MIB)
    with under_attack(attacked):
        status, answer = post(attacked, body, **headers)
    assert status == 200
    assert answer.count(b",0") == 16 * MIB - 1


@pytest.mark.parametrize("count", [3, 1_000_000])
def test_classification(attacked: Headrace, under_attack: Attack, count: int) -> None:
    size = 1_000_000
    body, headers = raw(size, outputs=[{"name": "OUT", "parameters": {"classification": count}}])
    with under_attack(attacked):
        status, answer = post(attacked, body, **headers)
    assert status == 200
    assert json.loads(answer)["outputs"][0]["data"][:3] == ["0:0", "0:1", "0:2"]


def test_a_load_of_files(attacked_natively: Headrace, under_attack: Attack) -> None:
    text = base64.b64encode(bytes(40 * MIB)).decode()
    body = json.dumps({"parameters": {"config": "{}", "file:1/x": text}}).encode()
    with under_attack(attacked_natively):
        status, answer = post(attacked_natively, body, "/v2/repository/models/huge/load")
    assert status == 503, answer  # the control mode is another


# ---------------------------------------------------------------------- gRPC


def infer_request(count: int, **contents: Any) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name="huge")
    tensor = request.inputs.add(name="IN", datatype="INT32", shape=[count])
    for name, values in contents.items():
        getattr(tensor.contents, name).extend(values)
    return request


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a message."""
    size, varint = len(content), bytearray()
    while size > 0x7F:
        varint.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([number << 3 | 2, *varint, size]) + content


def typed(number: int, content: bytes, datatype: bytes = b"INT32") -> bytes:
    """A request whose one tensor has ``content`` as a field of its typed contents."""
    shape = field(3, b"\xff\xff\xff\x1f")
    return field(1, b"huge") + field(5, field(1, b"IN") + field(2, datatype) + shape + field(5, field(number, content)))


MESSAGES: dict[str, Callable[[int], bytes]] = {
    "packed int_contents": lambda mib: typed(2, bytes(60 * mib)),
    "packed bool_contents": lambda mib: typed(1, bytes(60 * mib)),
    "packed int64_contents of ten bytes each": lambda mib: typed(3, (b"\xff" * 9 + b"\1") * (6 * mib)),
    "packed shape": lambda mib: field(1, b"huge") + field(5, field(1, b"IN") + field(3, bytes(60 * mib))),
    "inputs": lambda mib: field(1, b"huge") + field(5, b"") * (16 * mib),
    "outputs": lambda mib: field(1, b"huge") + field(6, b"") * (16 * mib),
    "parameters": lambda mib: field(1, b"huge") + field(4, b"") * (16 * mib),
    "parameters of an input": lambda mib: field(1, b"huge") + field(5, field(4, b"") * (16 * mib)),
    "raw contents": lambda mib: field(1, b"huge") + field(7, b"") * (16 * mib),
    "unpacked int_contents": lambda mib: (
        field(1, b"huge") + field(5, field(1, b"IN") + field(2, b"INT32") + field(5, b"\x10\0" * (4 * mib)))
    ),
    "strings": lambda mib: (
        field(1, b"huge") + field(5, field(1, b"IN") + field(2, b"BYTES") + field(5, b"\x42\0" * (4 * mib)))
    ),
}


@pytest.mark.parametrize("message", list(MESSAGES))
@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip], ids=["plain", "gzip"])
def test_message(attacked: Headrace, under_attack: Attack, message: str, compression: Any, mib: int) -> None:
    body = MESSAGES[message](mib)
    with under_attack(attacked):
        code, details = call(attacked, body, compression=compression)
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL), details


@pytest.mark.parametrize("method", ["ServerMetadata", "TraceSetting", "RepositoryModelLoad", "ModelStatistics"])
def test_message_of_another_kind(attacked: Headrace, under_attack: Attack, method: str, mib: int) -> None:
    body = field(1, b"") * (16 * mib)
    with under_attack(attacked):
        code, _ = call(attacked, body, f"/inference.GRPCInferenceService/{method}")
    assert code is grpc.StatusCode.INVALID_ARGUMENT


def test_gzip_over_grpc(attacked_natively: Headrace, under_attack: Attack, mib: int) -> None:
    """Three at a time, of two gibibytes each."""
    message = _framed(bomb(2032 * mib))
    with under_attack(attacked_natively), ThreadPoolExecutor(3) as pool:
        statuses = list(pool.map(lambda _: _send_framed(attacked_natively, message), range(3)))
    assert statuses == ["8"] * 3  # RESOURCE_EXHAUSTED


def test_gzip_over_grpcio(serve: Callable[..., Headrace], attack_repository: Any, under_attack: Attack) -> None:
    """grpcio unpacks where we cannot bound it but by the size of any message; what it holds, it gives back."""
    server = serve(f"--model-repository={attack_repository}", "--grpc-server=grpcio")
    with under_attack(server):
        assert _send_framed(server, _framed(bomb(2032 * MIB))) in ("3", "8", "13")


def _framed(packed: bytes) -> bytes:
    return b"\1" + len(packed).to_bytes(4, "big") + packed


def _send_framed(server: Headrace, message: bytes) -> str:
    """The status of ``ModelInfer`` with ``message`` as it is, compressed already."""

    import h2.connection
    import h2.events

    client = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    client.initiate_connection()
    with socket.create_connection(("127.0.0.1", server.grpc), timeout=120) as peer:
        client.send_headers(1, [
            (":method", "POST"), (":scheme", "http"), (":path", MODEL_INFER), (":authority", "x"),
            ("content-type", "application/grpc"), ("te", "trailers"), ("grpc-encoding", "gzip"),
        ])  # fmt: skip
        sent = 0
        while True:
            while sent < len(message) and (room := min(client.local_flow_control_window(1), 16384)) > 0:
                client.send_data(1, message[sent : sent + room], end_stream=sent + room >= len(message))
                sent += room
            peer.sendall(client.data_to_send())
            for event in client.receive_data(peer.recv(65536)):
                if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                    headers = {str(name): str(value) for name, value in event.headers}
                    if "grpc-status" in headers:
                        return headers["grpc-status"]


@pytest.fixture
def packing(serve: Callable[..., Headrace], attack_repository: Any) -> Headrace:
    return serve(f"--model-repository={attack_repository}", "--grpc-infer-response-compression-level=high")


def test_a_grpc_answer_to_be_compressed(packing: Headrace, under_attack: Attack) -> None:
    request = service_pb2.ModelInferRequest(model_name="huge")
    request.inputs.add(name="IN", datatype="UINT8", shape=[16 * MIB])
    noise = np.random.default_rng(1).integers(0, 64, 16 * MIB, np.uint8).tobytes()
    request.raw_input_contents.append(noise)
    message = request.SerializeToString()
    with under_attack(packing):
        code, answer = call(packing, message)
    assert code is grpc.StatusCode.OK
    assert service_pb2.ModelInferResponse.FromString(answer).raw_output_contents[0] == noise


def test_classification_over_grpc(attacked: Headrace, under_attack: Attack) -> None:
    request = service_pb2.ModelInferRequest(model_name="huge")
    request.inputs.add(name="IN", datatype="UINT8", shape=[1_000_000])
    request.raw_input_contents.append(bytes(1_000_000))
    request.outputs.add(name="OUT").parameters["classification"].int64_param = 1_000_000
    message = request.SerializeToString()
    with under_attack(attacked):
        code, _ = call(attacked, message)
    assert code is grpc.StatusCode.OK
