"""Requests of a hostile caller. The server refuses them, uses no more memory, and serves other callers.

The classes of fault are those in advisories of inference servers: floods of chunks and headers, deep JSON,
decompression bombs, false lengths, absurd counts, and text for the log.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Headrace

MIB = 1 << 20
LIMIT = 64 * MIB  # --http-max-input-size, by default
INFER = "/v2/models/echo/infer"
TENSOR = {"name": "IN", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}
JSON_ROUTES = [INFER, "/v2/repository/index", "/v2/repository/models/echo/load", "/v2/repository/models/echo/unload"]
CHUNKED = "Transfer-Encoding: chunked\r\n"
TOO_MANY = "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger HTTP chunks."


@pytest.fixture(scope="module")
def running(
    keep_serving: Callable[..., Headrace], add_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Headrace:
    root = tmp_path_factory.mktemp("models")
    add_model(root, "echo")
    return keep_serving(f"--model-repository={root}")


@pytest.fixture
def server(running: Headrace, infer: Callable[..., list[float]]) -> Iterator[Headrace]:
    """The server, which after the test answers as before and has kept no more than it may."""
    before = running.rss_bytes
    running.forget_peak()
    yield running
    # At most a body, its unpacked form, and the Python objects of it.
    assert running.peak_rss_bytes < before + 4 * LIMIT
    assert infer(running) == [1.0, 2.0]
    running.wait_until_rss(before + 2 * LIMIT)


def talk(server: Headrace, head: str, body: bytes = b"", path: str = INFER) -> tuple[int, str]:
    """Send a POST as it is spelled out, for as long as the server listens. Status and error text."""
    with socket.create_connection(("127.0.0.1", server.http), timeout=30) as caller, ThreadPoolExecutor(1) as pool:
        pool.submit(send_all, caller, f"POST {path} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode(), body)
        return read_reply(caller)


def send_all(caller: socket.socket, *pieces: bytes) -> None:
    with contextlib.suppress(OSError):  # the server has received enough
        for piece in pieces:
            caller.sendall(piece)


def read_reply(caller: socket.socket) -> tuple[int, str]:
    """Status and error text, or (0, "") where the server closed without a word."""
    with caller.makefile("rb") as stream:
        status_line = stream.readline()
        if not status_line:
            return 0, ""
        length = 0
        while (line := stream.readline()) not in (b"\r\n", b""):
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        body = stream.read(length)
    with contextlib.suppress(OSError):  # ends the clients that still send
        caller.shutdown(socket.SHUT_RDWR)
    return int(status_line.split()[1]), json.loads(body).get("error", "") if body else ""


# ---------------------------------------------------------------------- bodies


def test_three_megabytes_in_chunks_of_one_byte_are_refused_and_delay_no_client(
    server: Headrace, infer: Callable[..., list[float]]
) -> None:
    with ThreadPoolExecutor(1) as pool:
        flood = pool.submit(talk, server, CHUNKED, b"1\r\n \r\n" * 3_000_000)
        while not flood.done():
            assert infer(server) == [1.0, 2.0]
        assert flood.result() == (400, TOO_MANY)


def test_one_chunk_over_the_limit_is_one_too_many(server: Headrace) -> None:
    text = json.dumps({"inputs": [TENSOR]}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in text.rjust(65536))
    assert talk(server, CHUNKED, chunks + b"0\r\n\r\n") == (200, "")
    assert talk(server, CHUNKED, chunks + b"1\r\n \r\n0\r\n\r\n") == (400, TOO_MANY)


@pytest.mark.parametrize("path", JSON_ROUTES)
@pytest.mark.parametrize("depth", [101, 1_000_000])
def test_deep_json_is_refused_on_every_route(server: Headrace, post: Callable[..., Any], path: str, depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    objects = b'{"a":' * depth + b"1" + b"}" * depth
    for text in (nested, objects, b'{"inputs":' + nested + b"}", b'{"parameters":' + objects + b"}",
                 b'{"ready":' + nested + b"}"):  # fmt: skip
        reply = post(server, path, text)
        assert reply.status in (400, 500, 503), reply.body[:200]
        assert len(reply.error) < 1000


@pytest.mark.parametrize("depth", [101, 1_000_000])
def test_deep_tensor_data_is_refused_with_the_limit(server: Headrace, post: Callable[..., Any], depth: int) -> None:
    nested = "[" * depth + "1.0" + "]" * depth
    text = f'{{"inputs":[{{"name":"IN","datatype":"FP32","shape":[1],"data":{nested}}}]}}'
    reply = post(server, INFER, text.encode())
    assert (reply.status, reply.error) == (400, "JSON nesting depth exceeds maximum allowed limit (100)")


def test_deep_json_inside_a_string_is_refused(server: Headrace, post: Callable[..., Any]) -> None:
    config = '{"a":' * 1_000_000
    reply = post(server, "/v2/repository/models/echo/load", {"parameters": {"config": config}})
    assert reply.status in (400, 503)


def bomb(head: bytes, blocks: int) -> bytes:
    """A compressed stream of ``blocks`` times 16 MiB of zeros; each block is reset, so they are all alike."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(16 * MIB)) + packer.flush(zlib.Z_FULL_FLUSH)
    return head + block * blocks


HEADS = {"gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff", "deflate": b"\x78\xda"}


@pytest.mark.parametrize("encoding", HEADS)
def test_ten_gigabytes_in_ten_megabytes_are_refused_at_the_limit(
    server: Headrace, post: Callable[..., Any], encoding: str
) -> None:
    packed = bomb(HEADS[encoding], 640)
    assert len(packed) < 12 * MIB
    reply = post(server, INFER, packed, {"Content-Encoding": encoding})
    assert (reply.status, reply.error) == (
        400,
        f"Decompressed data size exceeds the maximum allowed value of {LIMIT} bytes. Use --http-max-input-size to "
        "increase the limit.",
    )
    server.wait_until_rss(server.rss_bytes + LIMIT)


@pytest.mark.parametrize("content", [zlib.compress(b"{}" * 999)[:-9], b"\x1f\x8b", b"nothing of the kind",
                                     zlib.compress(zlib.compress(b"{}"))])  # fmt: skip
def test_broken_compression_is_refused(server: Headrace, post: Callable[..., Any], content: bytes) -> None:
    assert post(server, INFER, content, {"Content-Encoding": "gzip"}).status in (400, 500)


# ---------------------------------------------------------------------- lengths


def test_a_terabyte_is_refused_when_it_is_announced(server: Headrace) -> None:
    status, text = talk(server, f"Content-Length: {1 << 40}\r\n")
    assert status == 400
    assert str(1 << 40) in text


def test_a_body_one_byte_over_the_limit_is_refused_before_it_is_sent(server: Headrace) -> None:
    status, text = talk(server, f"Content-Length: {LIMIT + 1}\r\n")
    assert status == 400
    assert f"exceeds the maximum allowed input size of {LIMIT} bytes" in text


def test_a_chunked_body_of_no_end_is_refused_at_the_limit(server: Headrace) -> None:
    status, text = talk(server, CHUNKED, (b"100000\r\n" + b" " * MIB + b"\r\n") * 65)
    assert status == 400
    assert "Use --http-max-input-size to increase the limit." in text


@pytest.mark.parametrize("value", ["-1", "1.5", "abc", "9" * 99, "0x10", "+5", "5,5", "5 5", ""])
def test_a_content_length_that_is_none_is_refused(server: Headrace, value: str) -> None:
    assert talk(server, f"Content-Length: {value}\r\nConnection: close\r\n", b"x" * 20)[0] in (400, 500)


SMUGGLED = [
    "Content-Length: 5\r\nContent-Length: 6\r\n",
    "Content-Length: 5\r\nContent-Length: 5\r\n",
    "Content-Length: 5\r\n" + CHUNKED,
    CHUNKED + "Content-Length: 5\r\n",
    "Transfer-Encoding: identity\r\nContent-Length: 5\r\n",
    "Transfer-Encoding: xchunked\r\n",
    "Transfer-Encoding : chunked\r\n",
    " Content-Length: 5\r\n",
    "X: y\r\n Content-Length: 5\r\n",
    "Content-Length\t: 5\r\n",
    "X\x00Y: z\r\n",
]


@pytest.mark.parametrize("head", SMUGGLED)
def test_a_body_whose_end_is_in_doubt_ends_the_connection(server: Headrace, head: str) -> None:
    """Else what follows could be taken for a request of another caller behind the same proxy."""
    with socket.create_connection(("127.0.0.1", server.http), timeout=30) as caller:
        hidden = b"0\r\n\r\nGET /v2/health/live HTTP/1.1\r\nHost: hidden\r\n\r\n"
        send_all(caller, f"POST {INFER} HTTP/1.1\r\nHost: x\r\n{head}\r\n".encode(), hidden)
        with caller.makefile("rb") as stream:
            text = stream.read()
    assert text.startswith(b"HTTP/1.1 400")
    assert text.count(b"HTTP/1.1 ") == 1


def test_half_open_connections_delay_no_client(server: Headrace, infer: Callable[..., list[float]]) -> None:
    """Heads that never end, and large bodies that never arrive, cost no memory that was not sent."""
    before = server.rss_bytes
    heads = [b"", b"POST ", f"POST {INFER} HTTP/1.1\r\nHost:".encode(),
             f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {LIMIT}\r\n\r\n".encode()]  # fmt: skip
    callers = [socket.create_connection(("127.0.0.1", server.http), timeout=30) for _ in range(200)]
    try:
        for number, caller in enumerate(callers):
            caller.sendall(heads[number % len(heads)])
        assert infer(server) == [1.0, 2.0]
        assert server.rss_bytes - before < LIMIT
    finally:
        for caller in callers:
            caller.close()


def test_a_slowly_sent_request_delays_no_client_and_is_answered(
    server: Headrace, infer: Callable[..., list[float]]
) -> None:
    text = json.dumps({"inputs": [TENSOR]})
    whole = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
    with socket.create_connection(("127.0.0.1", server.http), timeout=30) as caller:
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for number, byte in enumerate(whole):
            caller.sendall(bytes([byte]))
            if number % 20 == 0:
                assert infer(server) == [1.0, 2.0]
        assert read_reply(caller) == (200, "")


@pytest.mark.parametrize("head", ["".join(f"H{number}: v\r\n" for number in range(5000)), f"H: {'v' * MIB}\r\n",
                                  f"{'H' * MIB}: v\r\n"])  # fmt: skip
def test_a_flood_of_headers_is_refused(server: Headrace, head: str) -> None:
    assert talk(server, head)[0] in (400, 431)


def test_a_path_of_a_megabyte_is_refused(server: Headrace) -> None:
    assert talk(server, "Content-Length: 0\r\n", path="/" + "x" * MIB)[0] in (400, 404, 414, 431)


def test_trailers_are_bounded_too(server: Headrace) -> None:
    assert talk(server, CHUNKED, b"0\r\n" + b"X: y\r\n" * 200_000)[0] in (400, 431)


@pytest.mark.parametrize("port", ["HTTPService", "GRPCInferenceService", "Metrics Service"])
@pytest.mark.parametrize("noise", [b"\x00" * 1000, b"\xff" * 1000, b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                                   b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 1000, b"\n" * 100_000])  # fmt: skip
def test_noise_on_a_port_affects_no_client(server: Headrace, port: str, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.ports[port]), timeout=30) as caller:
        send_all(caller, noise)
    assert server.get("/v2/health/live")[0] == 200
    assert server.get("/metrics", server.ports["Metrics Service"])[0] == 200


def test_tls_on_a_plain_port_affects_no_client(server: Headrace) -> None:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(("127.0.0.1", server.http), timeout=30) as caller:
        caller.settimeout(30)
        with pytest.raises(OSError):  # noqa: PT011  ssl has many words for it
            context.wrap_socket(caller)


# ---------------------------------------------------------------------- counts


def test_a_hundred_thousand_outputs_are_refused(server: Headrace, post: Callable[..., Any]) -> None:
    for outputs in ([{"name": "OUT"}] * 100_000, [{"name": f"O{number}"} for number in range(100_000)]):
        reply = post(server, INFER, {"inputs": [TENSOR], "outputs": outputs})
        assert reply.status == 400
        assert len(reply.error) < 1000


def test_a_hundred_thousand_inputs_are_refused(server: Headrace, post: Callable[..., Any]) -> None:
    reply = post(server, INFER, {"inputs": [{**TENSOR, "name": f"I{number}"} for number in range(100_000)]})
    assert reply.status == 400


@pytest.mark.parametrize("count", [2**31, 2**63, 10**30])
def test_an_absurd_number_of_classes_is_refused(server: Headrace, post: Callable[..., Any], count: int) -> None:
    outputs = [{"name": "OUT", "parameters": {"classification": count}}]
    assert post(server, INFER, {"inputs": [TENSOR], "outputs": outputs}).status in (400, 500)


def test_more_than_a_million_elements_are_not_ranked(server: Headrace, post: Callable[..., Any]) -> None:
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1_000_001], "parameters": {"binary_data_size": 4_000_004}}
    outputs = [{"name": "OUT", "parameters": {"classification": 1}}]
    text = json.dumps({"inputs": [tensor], "outputs": outputs}).encode()
    length = {"Inference-Header-Content-Length": str(len(text))}
    reply = post(server, INFER, text + bytes(4_000_004), length)
    assert (reply.status, reply.error) == (400, "classification output tensor too large")


def test_a_flood_of_inputs_is_refused_by_number(server: Headrace, post: Callable[..., Any]) -> None:
    tensors = [{**TENSOR, "name": f"I{number}"} for number in range(5000)]
    reply = post(server, INFER, {"inputs": tensors})
    assert (reply.status, reply.error) == (400, "request has 5000 inputs, the limit is 4096")


def test_a_million_dims_are_refused_without_multiplying_them_out(server: Headrace, post: Callable[..., Any]) -> None:
    reply = post(server, INFER, {"inputs": [{**TENSOR, "shape": [2**63 - 1] * 1_000_000}]})
    assert reply.status == 400


@pytest.mark.parametrize("shape", [[2**31, 2**31, 2], [2**32, 2**32], [0, 2**63], [2**63 - 1], [2**62, 3], [1] * 65])
def test_an_absurd_shape_is_refused(server: Headrace, post: Callable[..., Any], shape: list[int]) -> None:
    for tensor in ({**TENSOR, "shape": shape}, {"name": "IN", "datatype": "FP32", "shape": shape,
                                               "parameters": {"binary_data_size": 8}}):  # fmt: skip
        text = json.dumps({"inputs": [tensor]}).encode()
        tail = b"" if "data" in tensor else bytes(8)
        reply = post(server, INFER, text + tail, {"Inference-Header-Content-Length": str(len(text))} if tail else {})
        assert reply.status in (400, 500)


def test_refusals_keep_no_memory(server: Headrace, post: Callable[..., Any]) -> None:
    """Half a gigabyte of refused tensors takes no memory afterwards."""
    text = json.dumps({"inputs": [{"name": "IN", "datatype": "FP32", "shape": [3], "parameters": {
        "binary_data_size": 16 * MIB}}]}).encode()  # fmt: skip
    length = {"Inference-Header-Content-Length": str(len(text))}
    before = server.rss_bytes
    for _ in range(32):
        assert post(server, INFER, text + bytes(16 * MIB), length).status == 400
    server.wait_until_rss(before + LIMIT)
