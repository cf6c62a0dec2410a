"""Windows in both directions (RFC 9113, section 5.2). The library ``h2`` is the client: it follows the rules, and
reports violations of the server."""

from __future__ import annotations

import socket
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any

import h2.config
import h2.connection
import h2.events
import numpy as np
import pytest
from hyperframe import frame as frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as triton

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace
    from tests.core.headrace_grpc.conftest import Peer

FLOW = 3
WINDOW = 4  # SETTINGS_INITIAL_WINDOW_SIZE
MIB = 1 << 20
Connect = Callable[..., "Peer"]


class Client:
    """``h2`` on a socket: sends as much as its windows permit, credits the bytes that it reads, checks the server."""

    def __init__(self, port: int) -> None:
        self.http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.http2.initiate_connection()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=20)
        self.rest: dict[int, memoryview] = {}
        self.received: dict[int, bytearray] = {}
        self.ended: set[int] = set()
        self.flush()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def flush(self) -> None:
        self.socket.sendall(self.http2.data_to_send())

    def start(self, stream: int, fields: list[tuple[str, str]], content: bytes) -> None:
        self.http2.send_headers(stream, fields)
        self.rest[stream], self.received[stream] = memoryview(content), bytearray()

    def run(self, *until: int) -> None:
        """Until the server has ended these streams."""
        self.push()
        while not self.ended.issuperset(until):
            self.pull()
            self.push()

    def push(self) -> None:
        """Send what the windows allow."""
        for stream, rest in list(self.rest.items()):
            while (room := min(self.http2.local_flow_control_window(stream), self.http2.max_outbound_frame_size)) > 0:
                piece, rest = rest[:room], rest[room:]
                self.http2.send_data(stream, piece.tobytes(), end_stream=not rest)
                if not rest:
                    del self.rest[stream]
                    break
                self.rest[stream] = rest
        self.flush()

    def pull(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, "the server closed the connection"
        for event in self.http2.receive_data(data):
            if isinstance(event, h2.events.DataReceived):
                self.received[event.stream_id] += event.data
                self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated), event
            if isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)


def content_of(body: bytes | bytearray) -> bytes:
    """The tensor in the one message of ``body``."""
    answer: bytes = triton.ModelInferResponse.FromString(bytes(body[5:])).raw_output_contents[0]
    assert len(body) == 5 + int.from_bytes(body[1:5], "big")
    return answer


# -------------------------------------------------------------------------- uploads


def test_sixteen_mebibytes_go_and_come_back(native: Headrace, peer: Peer) -> None:
    content = np.arange(4 * MIB, dtype=np.float32).tobytes()
    with Client(native.grpc) as client:
        client.start(1, peer.fields("ModelInfer"), peer.framed(peer.infer(content=content)))
        client.run(1)
        assert content_of(client.received[1]) == content


def test_calls_that_are_sent_at_the_same_time_do_not_mix(native: Headrace, peer: Peer) -> None:
    contents = {stream: np.full(MIB // 4, stream, np.float32).tobytes() for stream in range(1, 17, 2)}
    with Client(native.grpc) as client:
        for stream, content in contents.items():
            client.start(stream, peer.fields("ModelInfer"), peer.framed(peer.infer(content=content)))
        client.run(*contents)
        assert {stream: content_of(client.received[stream]) for stream in contents} == contents


def test_data_of_streams_that_end_early_is_credited(native: Headrace, connect: Connect) -> None:
    """Half of them the server ends, because there is no such method, and half the client."""
    peer = connect(native.grpc)
    peer.settle()
    burst = 4 * 16384
    sent = 0
    for stream in range(1, 801, 2):
        while credit(peer) - sent < burst:
            peer.read()
        peer.start(stream, "ModelInfer" if stream % 4 == 1 else "Nothing")
        peer.send(*[peer.data(stream, bytes(16384))] * 4, frames.RstStreamFrame(stream, 8))
        sent += burst
    assert sent > 20 * MIB
    assert peer.ask(801).status == 0


def credit(peer: Peer) -> int:
    """Return the bytes that the server has allowed the connection to send, from the beginning."""
    updates = [f for f in peer.seen if isinstance(f, frames.WindowUpdateFrame) and f.stream_id == 0]
    return 65535 + sum(update.window_increment for update in updates)


def test_padding_counts_and_is_credited(native: Headrace, peer: Peer) -> None:
    (given_,) = [f.settings for f in peer.seen if isinstance(f, frames.SettingsFrame) and "ACK" not in f.flags]
    window = given_.get(WINDOW, 65535)
    message = peer.framed(peer.infer(content=bytes(4 * (window // 256))))
    with Client(native.grpc) as client:  # a byte of data per frame of 257
        client.http2.send_headers(1, peer.fields("ModelInfer"))
        sent = 0
        client.received[1] = bytearray()
        while sent < len(message):
            while client.http2.local_flow_control_window(1) < 300:
                client.flush()
                client.pull()
            client.http2.send_data(1, message[sent : sent + 8], pad_length=255, end_stream=sent + 8 >= len(message))
            sent += 8
        client.flush()
        client.run(1)
        assert len(content_of(client.received[1])) == 4 * (window // 256)


def test_unread_data_is_neither_credited_nor_kept(native: Headrace, connect: Connect, gate: Gate) -> None:
    peer = connect(native.grpc)
    peer.settle()
    before = native.rss_bytes
    request = peer.framed(peer.infer("slow", bytes(1024)))
    peer.start(1, "ModelStreamInfer")
    for _ in range(64 * MIB // len(request)):  # of which the stream takes 1024
        peer.send(peer.data(1, request))
    refusal = peer.read()
    while not isinstance(refusal, frames.RstStreamFrame | frames.GoAwayFrame):
        refusal = peer.read()
    assert refusal.error_code == FLOW
    assert native.rss_bytes < before + 24 * MIB
    gate.open()
    assert connect(native.grpc).ask(1).status == 0


#: One connection for all examples.
STREAMS = count(1, 2)


@given(
    content=st.integers(0, 3000).map(lambda count: np.arange(count, dtype=np.float32).tobytes()),
    cuts=st.lists(st.integers(0, 12_000), max_size=30),
    pads=st.lists(st.none() | st.integers(0, 255), min_size=32, max_size=32),
    ends=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_message_arrives_whole_however_it_is_cut(
    peer: Peer, content: bytes, cuts: list[int], pads: list[int | None], ends: bool
) -> None:
    stream = next(STREAMS)
    message = peer.framed(peer.infer(content=content))
    marks = [0, *sorted(min(cut, len(message)) for cut in cuts), len(message)]
    pieces = [_piece(peer, stream, message[a:b], pad) for a, b, pad in zip(marks, marks[1:], pads, strict=False)]
    last = pieces[-1] if ends else peer.data(stream, b"")
    last.flags.add("END_STREAM")
    peer.send(peer.headers(stream, peer.fields("ModelInfer")), *pieces, *([] if ends else [last]))
    assert triton.ModelInferResponse.FromString(peer.answer(stream).message).raw_output_contents[0] == content


def _piece(peer: Peer, stream: int, content: bytes, pad: int | None) -> Any:
    return peer.data(stream, content) if pad is None else peer.data(stream, content, "PADDED", pad_length=pad)


# ------------------------------------------------------------------------ downloads


def arrived(peer: Peer, stream: int) -> int:
    """Return the bytes of DATA of a stream after everything permitted has arrived."""
    peer.settle()
    return len(peer.answers[stream].data) if stream in peer.answers else 0


def asked(native: Headrace, connect: Connect, window: int, size: int = 1024) -> Peer:
    """Return a peer with ``window`` for each stream that has requested ``size`` bytes on stream 1 and credits
    nothing."""
    peer = connect(native.grpc, {WINDOW: window})
    peer.settle()
    peer.credits = False
    peer.call(1, "ModelInfer", peer.infer(content=bytes(size)))
    peer.until(frames.HeadersFrame, 1)
    return peer


@pytest.mark.parametrize("window", [0, 1, 5, 600])
def test_an_answer_waits_for_its_window(native: Headrace, connect: Connect, window: int) -> None:
    peer = asked(native, connect, window)
    assert arrived(peer, 1) == window
    peer.send(peer.window(1, 100))
    assert arrived(peer, 1) == window + 100
    assert not peer.answers[1].ended
    peer.send(peer.window(1, 10_000))
    assert len(content_of(peer.answer(1).data)) == 1024
    assert peer.answers[1].status == 0


def test_settings_open_the_windows_of_open_streams(native: Headrace, connect: Connect) -> None:
    peer = asked(native, connect, 0)
    assert arrived(peer, 1) == 0
    peer.send(frames.SettingsFrame(settings={WINDOW: 30}))
    assert arrived(peer, 1) == 30
    peer.send(frames.SettingsFrame(settings={WINDOW: 40}))
    assert arrived(peer, 1) == 40


def test_settings_are_acknowledged_before_what_they_allow(native: Headrace, connect: Connect) -> None:
    """Until then the client may hold the server to the window before; grpc's core does."""
    peer = asked(native, connect, 0)
    peer.settle()
    began = len(peer.seen)
    peer.send(frames.SettingsFrame(settings={WINDOW: 30}))
    peer.until(frames.DataFrame)
    kinds = [type(frame) for frame in peer.seen[began:]]
    assert kinds == [frames.SettingsFrame, frames.DataFrame]


def test_a_window_may_become_negative(native: Headrace, connect: Connect) -> None:
    peer = asked(native, connect, 100)
    assert arrived(peer, 1) == 100
    peer.send(frames.SettingsFrame(settings={WINDOW: 20}), peer.window(1, 80))
    assert arrived(peer, 1) == 100  # from -80 to 0
    peer.send(peer.window(1, 1))
    assert arrived(peer, 1) == 101
    peer.send(frames.SettingsFrame(settings={WINDOW: 30}))
    assert arrived(peer, 1) == 111


def test_the_window_of_the_connection_holds_all_streams(native: Headrace, connect: Connect) -> None:
    peer = connect(native.grpc, {WINDOW: 1 << 20})
    peer.credits = False
    for stream in (1, 3, 5):
        peer.call(stream, "ModelInfer", peer.infer(content=bytes(40_000)))
    while sum(len(answer.data) for answer in peer.answers.values()) < 65535:
        peer.read()
    assert sum(arrived(peer, stream) for stream in (1, 3, 5)) == 65535
    peer.send(peer.window(0, 1 << 20))
    assert [len(content_of(peer.answer(stream).data)) for stream in (1, 3, 5)] == [40_000] * 3


def test_a_stream_that_waits_holds_no_other(native: Headrace, connect: Connect) -> None:
    peer = asked(native, connect, 0)
    peer.call(3, "ModelInfer", peer.infer(content=bytes(8)))
    peer.send(peer.window(3, 100_000))
    assert len(content_of(peer.answer(3).data)) == 8
    assert arrived(peer, 1) == 0


def test_an_error_needs_no_window(native: Headrace, connect: Connect) -> None:
    peer = connect(native.grpc, {WINDOW: 0})
    assert peer.ask(1, "ModelInfer", peer.infer("nothing")).status == 5


def test_a_stream_that_waits_can_be_reset(native: Headrace, connect: Connect) -> None:
    peer = asked(native, connect, 10, 100_000)
    assert arrived(peer, 1) == 10
    peer.send(frames.RstStreamFrame(1, 8), peer.window(1, 50_000))
    assert arrived(peer, 1) == 10
    peer.send(peer.window(0, 1 << 20))
    peer.call(3, "ModelInfer", peer.infer(content=bytes(4000)))
    peer.send(peer.window(3, 200_000))
    assert len(content_of(peer.answer(3).data)) == 4000


def test_answers_of_a_stream_wait_in_order(native: Headrace, connect: Connect) -> None:
    peer = connect(native.grpc, {WINDOW: 0})
    peer.credits = False
    peer.start(1, "ModelStreamInfer")
    ids = [str(number) for number in range(200)]
    peer.send(*(peer.data(1, peer.framed(peer.infer(id=each))) for each in ids), peer.data(1, b"", "END_STREAM"))
    assert arrived(peer, 1) == 0
    while not (1 in peer.answers and peer.answers[1].ended):
        peer.send(peer.window(1, 7 * 17))
        peer.settle()
    found = [triton.ModelStreamInferResponse.FromString(body) for _, body in peer.answers[1].messages]
    assert [answer.infer_response.id for answer in found] == ids


def test_answers_that_a_client_leaves_behind_are_dropped(native: Headrace, connect: Connect) -> None:
    """It requests 64 answers of 1 MiB, has the largest windows, and reads nothing.

    The allocator may keep the memory of the first such client; later ones must cost nothing.
    """

    def ask_and_leave() -> None:
        peer = connect(native.grpc, {WINDOW: (1 << 31) - 1})
        peer.send(peer.window(0, (1 << 31) - 1 - 65535))
        peer.settle()
        message = peer.infer(content=bytes(MIB))
        for stream in range(1, 129, 2):
            peer.call(stream, "ModelInfer", message)
        assert connect(native.grpc).ask(1).status == 0
        peer.close()

    before = native.rss_bytes
    for _ in range(4):
        ask_and_leave()
    native.wait_until_rss(before + 128 * MIB)
