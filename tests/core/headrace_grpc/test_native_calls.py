"""gRPC over HTTP/2 on the native host, frame by frame.

Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md; for what it leaves open, grpc's core.
"""

from __future__ import annotations

import gzip
import signal
import ssl
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pytest
from hyperframe import frame as frames
from tritonclient.grpc import service_pb2 as triton

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace
    from tests.core.headrace_grpc.conftest import Answer, Peer

OK, DEADLINE, NOT_FOUND, EXHAUSTED, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 0, 4, 5, 8, 12, 13, 14
CALM, CANCEL = 11, 8
SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."
Connect = Callable[..., "Peer"]
Serve = Callable[..., "Headrace"]
LIVE = triton.ServerLiveResponse(live=True).SerializeToString()


# ------------------------------------------------------------------- the form of answers


def test_an_answer_is_headers_a_message_and_trailers(peer: Peer) -> None:
    answer = peer.ask(1)
    assert answer.headers == {":status": "200", "content-type": "application/grpc"}
    assert answer.messages == [(0, LIVE)]
    assert answer.trailers == {"grpc-status": "0"}
    assert answer.reset is None


def test_a_refusal_is_trailers_only(peer: Peer) -> None:
    answer = peer.ask(1, "ModelInfer", peer.infer("nothing"))
    assert (answer.headers, answer.data, answer.reset) == ({}, b"", None)
    text = "Request for unknown model: 'nothing' is not found"
    assert answer.trailers == {
        ":status": "200", "content-type": "application/grpc", "grpc-status": "5", "grpc-message": text,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["100 %", "ünïcode", "日本🚰", "tab\tand\nnewline", "~{|}~", "\x7f"])
def test_texts_are_percent_encoded(peer: Peer, name: str) -> None:
    message = peer.ask(1, "ModelInfer", peer.infer(name)).trailers["grpc-message"]
    assert all(" " <= character <= "~" for character in message)
    assert unquote(message) == f"Request for unknown model: '{name}' is not found"
    assert ("%25" in message) == ("%" in name)


def test_a_small_answer_comes_in_one_piece(peer: Peer) -> None:
    """So that neither TCP nor the client waits for the rest of it."""
    peer.call(1)
    received = peer.socket.recv(65536)
    assert received[3] == 1
    kinds, at = [], 0
    while at < len(received):
        kinds.append(received[at + 3])
        at += 9 + int.from_bytes(received[at : at + 3], "big")
    assert (kinds, at) == ([1, 0, 1], len(received))


def test_rest_of_a_refused_call_is_declined(peer: Peer) -> None:
    """The call has ended, though the client has not: RFC 9113, section 8.1."""
    peer.start(1, "Nothing")
    assert peer.answer(1).status == UNIMPLEMENTED
    assert peer.until(frames.RstStreamFrame, 1).error_code == 0
    peer.send(peer.data(1, bytes(1000)), peer.data(1, b"", "END_STREAM"))
    assert peer.ask(3).status == OK


# ------------------------------------------------------------------ the form of requests


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto", "application/grpc+json",
                                          "application/grpc;charset=utf-8"])  # fmt: skip
def test_any_kind_of_grpc_is_taken(peer: Peer, content_type: str) -> None:
    peer.send(peer.headers(1, [*peer.fields()[:-1], ("content-type", content_type)]))
    peer.send(peer.data(1, peer.framed(b""), "END_STREAM"))
    assert peer.answer(1).message == LIVE


@pytest.mark.parametrize("content_type", ["application/json", "application/grpc-web", "application/grpcx", "", None])
def test_another_content_type_is_415(peer: Peer, content_type: str | None) -> None:
    more = [] if content_type is None else [("content-type", content_type)]
    peer.send(peer.headers(1, [*peer.fields()[:-1], *more], "END_STREAM"))
    answer = peer.answer(1)
    assert {**answer.headers, **answer.trailers}[":status"] == "415"


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS", "post"])
def test_another_method_is_405(peer: Peer, method: str) -> None:
    peer.send(peer.headers(1, peer.fields(_method=method), "END_STREAM"))
    answer = peer.answer(1)
    assert {**answer.headers, **answer.trailers}[":status"] == "405"


BODIES: list[tuple[str, Callable[[Peer], bytes], int]] = [
    ("no message", lambda p: b"", UNIMPLEMENTED),
    ("two messages", lambda p: p.framed(b"") * 2, UNIMPLEMENTED),
    ("two messages, the second cut short", lambda p: p.framed(b"") + b"\0", UNIMPLEMENTED),
    ("a message cut short", lambda p: p.framed(bytes(10))[:-1], INTERNAL),
    ("a prefix cut short", lambda p: b"\0\0\0", INTERNAL),
    ("a flag that means nothing", lambda p: p.framed(b"", packed=2), INTERNAL),
    ("a packed message without an encoding", lambda p: p.framed(gzip.compress(b""), packed=1), INTERNAL),
]


@pytest.mark.parametrize("cut", [1, 3, 16384])
@pytest.mark.parametrize(("body", "status"), [row[1:] for row in BODIES], ids=[row[0] for row in BODIES])
def test_a_body_that_is_not_one_message_is_refused(
    peer: Peer, body: Callable[[Peer], bytes], status: int, cut: int
) -> None:
    content = body(peer)
    peer.start(1)
    peer.send(*(peer.data(1, content[at : at + cut]) for at in range(0, len(content), cut)))
    peer.send(peer.data(1, b"", "END_STREAM"))
    assert peer.answer(1).status == status
    assert peer.ask(3).status == OK


def test_a_stream_whose_last_message_is_cut_short_answers_the_others(peer: Peer) -> None:
    peer.start(1, "ModelStreamInfer")
    peer.send(peer.data(1, peer.framed(peer.infer()) + peer.framed(peer.infer())[:-1], "END_STREAM"))
    answer = peer.answer(1)
    assert answer.status == INTERNAL


@pytest.mark.parametrize("where", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
def test_a_message_over_2_gib_is_refused_at_its_prefix(peer: Peer, where: str) -> None:
    peer.start(1, where)
    peer.send(peer.data(1, b"\0\xff\xff\xff\xff"))
    answer = peer.answer(1)
    assert answer.status == EXHAUSTED
    assert "2147483647" in answer.trailers["grpc-message"]


# ------------------------------------------------------------------------- compression


PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
@pytest.mark.parametrize("encoding", PACK)
def test_packed_requests_are_read(peer: Peer, method: str, encoding: str) -> None:
    content = bytes(40_000)
    packed = PACK[encoding](peer.infer(content=content))
    peer.call(1, method, packed, ("grpc-encoding", encoding), packed=1)
    assert content_of(peer.answer(1), method) == content
    peer.call(3, method, peer.infer(content=content), ("grpc-encoding", encoding))  # the flag decides
    assert content_of(peer.answer(3), method) == content


def content_of(answer: Answer, method: str, unpack: Callable[[bytes], bytes] | None = None) -> bytes:
    ((flag, body),) = answer.messages
    assert (answer.status, flag) == (OK, int(unpack is not None))
    body = body if unpack is None else unpack(body)
    if method == "ModelStreamInfer":
        body = triton.ModelStreamInferResponse.FromString(body).infer_response.SerializeToString()
    content: bytes = triton.ModelInferResponse.FromString(body).raw_output_contents[0]
    return content


def test_an_unknown_encoding_is_refused_and_the_known_are_named(peer: Peer) -> None:
    answer = peer.ask(1, "ServerLive", b"", ("grpc-encoding", "br"))
    assert answer.status == UNIMPLEMENTED
    named = answer.trailers["grpc-accept-encoding"].replace(" ", "").split(",")
    assert set(named) == {"identity", "gzip", "deflate"}


@pytest.mark.parametrize("damaged", [b"", b"noise", gzip.compress(b"x" * 100, mtime=0)[:-9]])
def test_a_packed_message_that_is_damaged_is_refused(peer: Peer, damaged: bytes) -> None:
    peer.call(1, "ModelInfer", damaged, ("grpc-encoding", "gzip"), packed=1)
    assert peer.answer(1).status == INTERNAL
    assert peer.ask(3).status == OK


def test_answers_are_packed_only_for_who_takes_them_and_only_inference(serve_native: Serve, connect: Connect) -> None:
    server = serve_native("--grpc-infer-response-compression-level=low")
    peer = connect(server.grpc)
    accepts = ("grpc-accept-encoding", "identity,deflate,gzip")
    content = bytes(40_000)
    for stream, method in ((1, "ModelInfer"), (3, "ModelStreamInfer")):
        answer = peer.ask(stream, method, peer.infer(content=content), accepts)
        assert answer.headers["grpc-encoding"] == "gzip"
        assert len(answer.data) < 1000
        assert content_of(answer, method, gzip.decompress) == content
    assert content_of(peer.ask(5, "ModelInfer", peer.infer(content=content)), "ModelInfer") == content
    other = peer.ask(7, "ServerMetadata", b"", accepts)
    assert ("grpc-encoding" in other.headers, other.messages[0][0]) == (False, 0)


# ----------------------------------------------------------- deadlines and disconnects


@pytest.mark.parametrize("timeout", ["50m", "50000u", "50000000n", "0m", "0H", "1n"])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_deadline_takes_the_request_out_of_the_queue(
    native: Headrace, peer: Peer, gate: Gate, method: str, timeout: str
) -> None:
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    answer = peer.ask(3, method, peer.infer("slow"), ("grpc-timeout", timeout))
    assert (answer.status, answer.trailers["grpc-message"]) == (DEADLINE, "Deadline Exceeded")
    native.wait_until_pending("slow", 0)
    gate.open()
    assert peer.answer(1).status == OK


@pytest.mark.parametrize("timeout", ["99999999H", "100S", "1M", "12345678m"])
def test_a_deadline_that_is_far_off_changes_nothing(peer: Peer, timeout: str) -> None:
    assert peer.ask(1, "ServerLive", b"", ("grpc-timeout", timeout)).message == LIVE


@pytest.mark.parametrize("timeout", ["", "5", "m", "-5m", "+5m", "5.0S", "5s", "5 m", "1234567890m", "٣S", "1_0S"])
def test_a_malformed_deadline_is_refused(peer: Peer, timeout: str) -> None:
    assert peer.ask(1, "ServerLive", b"", ("grpc-timeout", timeout)).status == INTERNAL
    assert peer.ask(3).status == OK


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_reset_takes_the_request_out_of_the_queue(native: Headrace, peer: Peer, gate: Gate, method: str) -> None:
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    cancelled = native.metric("nv_inference_request_failure", "slow", reason="CANCELED")
    peer.call(3, method, peer.infer("slow"))
    native.wait_until_pending("slow", 1)
    peer.send(frames.RstStreamFrame(3, CANCEL))
    native.wait_until_pending("slow", 0)
    native.wait_until_metric("nv_inference_request_failure", "slow", cancelled + 1)
    gate.open()
    assert peer.answer(1).status == OK
    assert not peer.answers[3].data if 3 in peer.answers else True


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_disconnect_takes_the_requests_out_of_the_queue(
    native: Headrace, connect: Connect, peer: Peer, gate: Gate, method: str
) -> None:
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    other = connect(native.grpc)
    for stream in (1, 3, 5):
        other.call(stream, method, peer.infer("slow"))
    native.wait_until_pending("slow", 3)
    other.close()
    native.wait_until_pending("slow", 0)
    gate.open()
    assert peer.answer(1).status == OK


def test_a_stream_that_is_half_open_keeps_its_answers_coming(peer: Peer) -> None:
    peer.start(1, "ModelStreamInfer")
    for number in range(3):
        peer.send(peer.data(1, peer.framed(peer.infer(id=str(number)))))
        while 1 not in peer.answers or len(peer.answers[1].messages) <= number:
            peer.until(frames.DataFrame, 1)
    peer.send(peer.data(1, b"", "END_STREAM"))
    assert peer.answer(1).status == OK


# --------------------------------------------------------------- keepalive and old age


PING = frames.PingFrame(opaque_data=bytes(8))


def test_pings_that_come_too_often_end_the_connection(peer: Peer) -> None:
    """By default two are forgiven, and five minutes are to lie between them (docs/spec/behaviours.md section 2.6)."""
    for _ in range(2):
        peer.send(PING)
        peer.until(frames.PingFrame)
    peer.settle()
    peer.send(PING, PING)
    farewell = peer.until(frames.GoAwayFrame)
    assert (farewell.error_code, farewell.additional_data) == (CALM, b"too_many_pings")
    peer.wait_until_closed()


def test_the_flags_say_how_often_a_client_may_ping(serve_native: Serve, connect: Connect) -> None:
    server = serve_native("--grpc-http2-max-ping-strikes=0")
    peer = connect(server.grpc)
    for _ in range(50):
        peer.send(PING)
        peer.until(frames.PingFrame)
    assert peer.ask(1).status == OK
    lax = serve_native(
        "--grpc-http2-min-recv-ping-interval-without-data=0", "--grpc-keepalive-permit-without-calls=true"
    )
    peer = connect(lax.grpc)
    for _ in range(50):
        peer.send(PING)
        peer.until(frames.PingFrame)
    assert peer.ask(1).status == OK


def test_the_server_pings_and_gives_up_who_does_not_answer(serve_native: Serve, connect: Connect) -> None:
    server = serve_native(
        "--grpc-keepalive-time=300", "--grpc-keepalive-timeout=300", "--grpc-keepalive-permit-without-calls=true"
    )
    dead = connect(server.grpc)
    dead.settle()
    found = dead.until(frames.PingFrame)
    assert "ACK" not in found.flags
    began = time.monotonic()
    dead.wait_until_closed()
    assert time.monotonic() - began < 30
    alive = connect(server.grpc)
    for _ in range(2):
        alive.send(frames.PingFrame(opaque_data=alive.until(frames.PingFrame).opaque_data, flags=["ACK"]))
    assert alive.ask(1).status == OK


def test_without_calls_the_server_does_not_ping_unless_told_to(serve_native: Serve, connect: Connect) -> None:
    server = serve_native("--grpc-keepalive-time=200", "--grpc-keepalive-timeout=200")
    peer = connect(server.grpc)
    peer.settle()
    peer.listen(1)
    assert peer.ask(1).status == OK
    assert not [frame for frame in peer.seen if isinstance(frame, frames.PingFrame)]


def test_an_old_connection_is_told_to_go_and_keeps_its_calls_for_a_while(
    serve_native: Serve, connect: Connect, gate: Gate
) -> None:
    server = serve_native("--grpc-max-connection-age=500", "--grpc-max-connection-age-grace=1000")
    peer = connect(server.grpc)
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    assert peer.until(frames.GoAwayFrame).error_code == 0
    peer.send(frames.PingFrame(opaque_data=peer.until(frames.PingFrame).opaque_data, flags=["ACK"]))
    assert peer.until(frames.GoAwayFrame).last_stream_id == 1
    gate.open()
    assert peer.answer(1).status == OK
    peer.wait_until_closed()


def test_an_old_connection_is_cut_after_its_grace(serve_native: Serve, connect: Connect, gate: Gate) -> None:
    server = serve_native("--grpc-max-connection-age=300", "--grpc-max-connection-age-grace=300")
    peer = connect(server.grpc)
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    peer.wait_until_closed()
    assert not peer.answers[1].ended if 1 in peer.answers else True
    gate.open()


# -------------------------------------------------------------------------------- stop


def test_a_stop_answers_what_is_in_flight_and_says_farewell(serve_native: Serve, connect: Connect, gate: Gate) -> None:
    server = serve_native("--exit-timeout-secs=20")
    peer, idle = connect(server.grpc), connect(server.grpc)
    idle.settle()
    peer.call(1, "ModelInfer", peer.infer("slow"))
    gate.wait_until_running()
    server.process.send_signal(signal.SIGTERM)
    assert peer.until(frames.GoAwayFrame).error_code == 0
    peer.call(3, "ModelInfer", peer.infer())  # on its way before the farewell was read
    peer.send(frames.PingFrame(opaque_data=peer.until(frames.PingFrame).opaque_data, flags=["ACK"]))
    late = peer.answer(3)
    assert late.reset == 7 or late.status == UNAVAILABLE
    gate.open()
    assert peer.answer(1).status == OK
    peer.wait_until_closed()
    assert server.process.wait(10) == 0  # though ``idle`` has not answered the farewell's ping


def test_a_stop_says_farewell_to_those_who_ask_for_nothing(serve_native: Serve, connect: Connect) -> None:
    """A stream between two requests, one that has had none, and calls whose message has arrived in part or not at
    all."""
    server = serve_native("--exit-timeout-secs=30")
    peer = connect(server.grpc)
    peer.start(1, "ModelStreamInfer").send(peer.data(1, peer.framed(peer.infer())))
    peer.until(frames.DataFrame, 1)
    peer.start(3, "ModelStreamInfer")
    peer.start(5, "ModelInfer").send(peer.data(5, peer.framed(peer.infer())[:20]))
    peer.start(7, "ServerLive")
    peer.start(9, "ModelStreamInfer").send(peer.data(9, peer.framed(peer.infer())[:20]))
    peer.settle()
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert [peer.answer(stream).status for stream in (1, 3, 5, 7, 9)] == [UNAVAILABLE] * 5
    assert {peer.answers[stream].trailers["grpc-message"] for stream in (1, 3, 5, 7, 9)} == {SHUTTING_DOWN}
    assert server.process.wait(60) == 0
    assert time.monotonic() - began < 5  # a second on a quiet machine; 5 s are what callers may take who are not done


def test_a_stop_answers_what_a_stream_has_in_flight_before_its_farewell(
    serve_native: Serve, connect: Connect, gate: Gate
) -> None:
    server = serve_native("--exit-timeout-secs=30")
    peer = connect(server.grpc)
    peer.start(1, "ModelStreamInfer").send(peer.data(1, peer.framed(peer.infer("slow", id="a"))))
    gate.wait_until_running()
    server.process.send_signal(signal.SIGTERM)
    assert peer.until(frames.GoAwayFrame).error_code == 0
    gate.open()
    answer = peer.answer(1)
    ((_, message),) = answer.messages
    assert triton.ModelStreamInferResponse.FromString(message).infer_response.id == "a"
    assert answer.status == UNAVAILABLE
    assert server.process.wait(20) == 0


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_a_stop_does_not_wait_for_those_who_do_not_read(serve_native: Serve, connect: Connect, method: str) -> None:
    server = serve_native("--exit-timeout-secs=30")
    peer = connect(server.grpc, {4: 0})
    peer.credits = False
    peer.call(1, method, peer.infer(content=bytes(4000)))
    peer.until(frames.HeadersFrame, 1)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert time.monotonic() - began < 20


def test_a_stop_tells_those_whom_it_has_no_time_for(serve_native: Serve, connect: Connect, gate: Gate) -> None:
    server = serve_native("--exit-timeout-secs=1")
    peer = connect(server.grpc)
    for stream, method in ((1, "ModelInfer"), (3, "ModelStreamInfer")):
        peer.start(stream, method).send(peer.data(stream, peer.framed(peer.infer("slow")), "END_STREAM"))
    gate.wait_until_running()
    peer.settle()
    server.process.send_signal(signal.SIGTERM)
    assert peer.answer(1).status == UNAVAILABLE
    ((_, message),) = peer.answer(3).messages
    assert triton.ModelStreamInferResponse.FromString(message).error_message
    assert server.process.wait(20) == 1  # as in docs/flags.md


# ------------------------------------------------------------ those who do not go on


def test_a_message_that_does_not_go_on_to_arrive_ends_its_call_and_no_other(
    serve_native: Serve, connect: Connect, gate: Gate
) -> None:
    server = serve_native("--grpc-message-timeout-secs=1")
    peer = connect(server.grpc)
    message = peer.framed(peer.infer(content=bytes(20_000)))
    peer.start(1, "ModelInfer").start(3, "ModelInfer").send(peer.data(3, message[:100]))
    peer.start(5, "ModelStreamInfer").send(peer.data(5, message[:3]))
    peer.start(7, "ModelStreamInfer")  # sends nothing, and may
    peer.call(9, "ModelInfer", peer.infer("slow"))  # its answer takes its time
    gate.wait_until_running()
    for stream in (1, 3, 5):
        answer = peer.answer(stream)
        assert (answer.status, answer.trailers["grpc-message"]) == (
            DEADLINE, "No more of the request message has arrived for 1 s.")  # fmt: skip
    gate.open()
    assert peer.answer(9).status == OK
    peer.send(peer.data(7, peer.framed(peer.infer()), "END_STREAM"))
    assert peer.answer(7).status == OK


def test_a_message_that_drips_is_ended_and_a_slow_one_is_not(serve_native: Serve, connect: Connect) -> None:
    server = serve_native("--grpc-message-timeout-secs=1")
    peer = connect(server.grpc)
    message = peer.framed(peer.infer(content=bytes(12_000)))
    peer.start(1, "ModelInfer").start(3, "ModelInfer").send(peer.data(3, message[:5]))
    for at in range(0, len(message), 400):  # 4 KB a second; and a byte ten times a second
        peer.send(peer.data(1, message[at : at + 400]))
        if at < 8_000:
            peer.send(peer.data(3, message[at : at + 1]))
        peer.listen(0.1)
    peer.send(peer.data(1, b"", "END_STREAM"))
    assert peer.answer(3).status == DEADLINE
    assert peer.answer(1).status == OK


@pytest.mark.parametrize("drip", [0, 1])
@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_client_that_does_not_read_is_disconnected(
    serve_native: Serve, connect: Connect, method: str, drip: int
) -> None:
    """Even one that lets an answer go byte by byte."""
    server = serve_native("--grpc-unread-timeout-secs=1")
    peer = connect(server.grpc, {4: 0})
    peer.credits = False
    peer.start(1, method).send(peer.data(1, peer.framed(peer.infer(content=bytes(100_000))), "END_STREAM"))
    peer.until(frames.HeadersFrame, 1)
    began = time.monotonic()
    while not peer.was_reset and time.monotonic() - began < 60:
        peer.send(*[peer.window(1, drip)] * drip)
        peer.listen(0.05)
        if not drip:
            peer.wait_until_closed()
            break
    assert 0.9 < time.monotonic() - began < 50
    assert connect(server.grpc).ask(1).status == OK


def test_calls_of_whoever_has_too_much_to_read_wait_until_it_is_read(
    serve_native: Serve, connect: Connect, gate: Gate
) -> None:
    server = serve_native("--grpc-max-unread-size=130000")
    peer = connect(server.grpc, {4: 0})
    peer.credits = False
    for stream in range(1, 9, 2):
        peer.call(stream, "ModelInfer", peer.infer(content=bytes(30_000)))
    peer.until(frames.HeadersFrame, 7)  # four answers, beside which there is no room for another, and windows are shut
    peer.call(9, "ModelInfer", peer.infer("slow"))
    peer.call(11, "ServerLive")
    peer.settle()
    assert server.metric("nv_inference_pending_request_count", "slow") == 0
    assert not (gate.path / "running").exists()
    peer.send(*(peer.window(stream, 100_000) for stream in (1, 3, 5, 7)), peer.window(0, 1 << 20))
    assert [peer.answer(stream).status for stream in (1, 3, 5, 7)] == [OK] * 4
    gate.wait_until_running()
    gate.open()
    peer.send(peer.window(9, 1000), peer.window(11, 1000))
    assert [peer.answer(stream).status for stream in (9, 11)] == [OK] * 2


def test_answers_beyond_what_may_be_unread_are_refused(serve_native: Serve, connect: Connect, gate: Gate) -> None:
    """The first may have any size. Streams opened before the limit was known end in a few bytes."""
    server = serve_native("--grpc-max-unread-size=100000")
    peer = connect(server.grpc, {4: 0})
    peer.credits = False
    for stream in (1, 3, 5):
        peer.call(stream, "ModelInfer", peer.infer("slow", bytes(60_000)))
    peer.settle()
    gate.open()
    assert [peer.answer(stream).status for stream in (3, 5)] == [EXHAUSTED] * 2
    assert peer.answers[3].trailers["grpc-message"].startswith("the client does not read: 60")
    peer.send(peer.window(1, 100_000), peer.window(0, 1 << 20))
    assert peer.answer(1).status == OK
    peer.call(7)
    peer.send(peer.window(7, 1000))
    assert peer.answer(7).message == LIVE


def test_whole_messages_beyond_the_memory_budget_are_refused_and_the_others_answered(
    serve_native: Serve, connect: Connect, gate: Gate
) -> None:
    """Each of 40 KB, and none waits for its client: they run. Smaller ones pass."""
    server = serve_native("--memory-budget=1000000")
    peer = connect(server.grpc, {4: 1 << 20})
    calls = range(1, 81, 2)
    for stream in calls:
        peer.call(stream, "ModelInfer", peer.infer("slow", bytes(40_000)))
    peer.call(81, "ModelInfer", peer.infer("identity", bytes(4000)))
    assert peer.answer(81).status == OK
    gate.open()
    statuses = [peer.answer(stream).status for stream in calls]
    assert statuses == [OK] * 24 + [EXHAUSTED] * 16  # 25 of 40,000 bytes and their heads are more than a million
    assert "--memory-budget" in peer.answers[79].trailers["grpc-message"]


@pytest.mark.parametrize("method", ["ModelInfer", "ModelStreamInfer"])
def test_large_messages_of_one_client_come_in_turn(serve_native: Serve, connect: Connect, method: str) -> None:
    """The next one has no credit before there is room for it, and is not ended meanwhile for not going on."""
    server = serve_native("--grpc-max-received-size=1000000", "--grpc-message-timeout-secs=1")
    peer = connect(server.grpc)
    message = peer.framed(peer.infer(content=bytes(800_000)))
    frames_of = {
        stream: [peer.data(stream, message[at : at + 16384]) for at in range(0, len(message), 16384)]
        for stream in (1, 3)
    }
    for stream, pieces in frames_of.items():
        pieces[-1].flags.add("END_STREAM")
        peer.start(stream, method).send(*pieces[:16])  # all that the window allows
    peer.settle()

    def credited() -> list[int]:
        return [each.stream_id for each in peer.seen if isinstance(each, frames.WindowUpdateFrame) and each.stream_id]

    assert credited() == [1]
    for piece in frames_of[1][16:]:
        peer.send(piece)
        peer.listen(0.1)  # slowly enough for the other to be ended
    assert peer.answer(1).status == OK
    peer.settle()
    assert credited() == [1, 3]
    peer.send(*frames_of[3][16:])
    assert peer.answer(3).status == OK
    assert len(peer.answer(3).data) > 800_000


@pytest.mark.parametrize("method", ["ModelStreamInfer", "ServerMetadata"])
def test_calls_that_are_reset_as_they_come_do_not_count_for_ever(peer: Peer, method: str) -> None:
    """More than a connection may have open: each is read together with its reset, before its task has begun."""
    reset = frames.RstStreamFrame
    calls = [
        (peer.headers(stream, peer.fields(method)), peer.data(stream, bytes(5), "END_STREAM"), reset(stream, CANCEL))
        for stream in range(1, 2401, 2)
    ]
    peer.send(*(frame for call in calls for frame in call))
    peer.settle()
    assert peer.ask(2401).message == LIVE


# --------------------------------------------------------------------------------- TLS


def test_over_tls_the_client_must_speak_http_2(serve_native: Serve, connect: Connect, pem: Path) -> None:
    files = (f"--grpc-server-cert={pem / 'cert.pem'}", f"--grpc-server-key={pem / 'key.pem'}")
    server = serve_native("--grpc-use-ssl=true", *files)

    def client(*protocols: str) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(pem / "cert.pem"))
        if protocols:
            context.set_alpn_protocols(list(protocols))
        return context

    peer = connect(server.grpc, tls=client("h2"))
    assert peer.ask(1).message == LIVE
    large = peer.ask(3, "ModelInfer", peer.infer(content=bytes(4_000_000)))
    assert len(content_of(large, "ModelInfer")) == 4_000_000
    for protocols in ((), ("http/1.1",)):
        connect(server.grpc, tls=client(*protocols)).wait_until_closed()
    connect(server.grpc).wait_until_closed()  # no TLS at all
    assert peer.ask(5).message == LIVE


# ------------------------------------------------------------------------ imports


def test_the_native_host_does_not_import_grpc(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from headrace.server import Server\n"
        f"with Server('{tmp_path}', grpc_port=0, http_port=0, metrics_port=0) as server:\n"
        "    asyncio.run_coroutine_threadsafe(server.start_frontends(), server.loop).result(20)\n"
        "    print([frontend.name for frontend in server.frontends], 'grpc' in sys.modules)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.strip().endswith("False")
    assert "'grpc'" in answer.stdout
