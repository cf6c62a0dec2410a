"""TCP delivers bytes in pieces of any size; the result of a connection does not depend on them.

The test passes the pieces to the protocol, as an event loop does, because it cannot choose the pieces
of a socket. The library ``h2`` reads the answers.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import h2.config
import h2.connection
import h2.events
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.options import ServerOptions
from headrace.engine import Operation
from headrace.off_loop import OffLoopWork
from headrace_grpc.frontend import Calls
from headrace_grpc.http2.connection import Connection
from headrace_grpc.http2.connections import Connections
from headrace_grpc.http2.lifetime import Keepalive
from headrace_grpc.http2.limits import Limits
from headrace_grpc.rpc import Cancel, Context, Reply, Rpc

FIELDS = [(":method", "POST"), (":scheme", "http"), (":path", "/test.Echo/Echo"), (":authority", "x"),
          ("te", "trailers"), ("content-type", "application/grpc")]  # fmt: skip


class Wire(asyncio.Transport):
    """Stores the written bytes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.is_closed = False
        self.is_paused = False

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        for each in list_of_data:
            self.written += each

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Sends all written bytes at once."""

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close


class Server:
    """One connection to a server that echoes, and that keeps every request it was given."""

    def __init__(self) -> None:
        self.kept: list[bytes | memoryview] = []
        calls = Calls(
            [Rpc("test.Echo", "Echo", Operation.LIVE, self._keep, direct=self._echo)], ServerOptions(), OffLoopWork()
        )
        self.wire = Wire()
        self.connection = Connection(Connections(calls, Limits(), Keepalive()))
        self.connection.connection_made(self.wire)

    async def feed(self, data: bytes, size: Callable[[], int]) -> None:
        """Hand over ``data`` in pieces of at most ``size()`` bytes, each as large as there is a buffer for."""
        at = 0
        while at < len(data):
            while self.wire.is_paused:
                await asyncio.sleep(0)
            buffer = self.connection.get_buffer(-1)
            taken = min(len(buffer), size(), len(data) - at)
            buffer[:taken] = data[at : at + taken]
            self.connection.buffer_updated(taken)
            at += taken

    def _keep(self, body: bytes | memoryview) -> bytes:
        self.kept.append(body)
        return bytes(body)

    @staticmethod
    def _echo(request: bytes, context: Context, reply: Reply) -> Cancel | None:
        reply(request)
        return None


class Client:
    """``h2``, with all windows as large as can be."""

    def __init__(self) -> None:
        self.http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.http2.initiate_connection()
        self.http2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 2**31 - 1})
        self.http2.increment_flow_control_window(2**31 - 1 - 65535)
        self.data: dict[int, bytes] = {}
        self.status: dict[int, str] = {}

    def read(self, data: bytes) -> None:
        pieces = (data[at : at + 65536] for at in range(0, len(data), 65536))
        for event in (event for piece in pieces for event in self.http2.receive_data(piece)):
            assert not isinstance(event, h2.events.StreamReset | h2.events.ConnectionTerminated), event
            if isinstance(event, h2.events.DataReceived):
                self.data[event.stream_id] = self.data.get(event.stream_id, b"") + event.data
            if isinstance(event, h2.events.TrailersReceived):
                self.status[event.stream_id] = {str(name): str(value) for name, value in event.headers}["grpc-status"]


async def exchange(messages: list[bytes], frames: Callable[[], int], pads: Callable[[], int | None],
                   segments: Callable[[], int]) -> None:  # fmt: skip
    """Send ``messages``, cut into frames and segments; all must be returned unchanged."""
    server, client = Server(), Client()
    await asyncio.sleep(0)

    async def talk() -> None:
        await server.feed(client.http2.data_to_send(), segments)
        client.read(bytes(server.wire.written))
        server.wire.written.clear()
        assert not server.wire.is_closed

    await talk()
    for number, message in enumerate(messages):
        stream = 2 * number + 1
        content = b"\0" + len(message).to_bytes(4, "big") + message
        client.http2.send_headers(stream, [*FIELDS, ("x-number", str(number % 7))])
        at = 0
        while at < len(content):
            pad = pads()
            room = client.http2.local_flow_control_window(stream) - (0 if pad is None else pad + 1)
            cut = min(frames(), client.http2.max_outbound_frame_size - 300, room, len(content) - at)
            if cut <= 0:
                await talk()
                await asyncio.sleep(0)
                continue
            client.http2.send_data(stream, content[at : at + cut], pad_length=pad, end_stream=at + cut == len(content))
            at += cut
    while len(client.status) < len(messages):
        await talk()
        await asyncio.sleep(0)
    assert set(client.status.values()) <= {"0"}
    assert [client.data[2 * number + 1][5:] for number in range(len(messages))] == messages
    assert [bytes(body) for body in server.kept] == messages


@given(
    sizes=st.lists(st.sampled_from([0, 1, 4, 100, 2043, 2048, 4096, 16_379, 20_000, 70_000]), min_size=1, max_size=6),
    frame=st.sampled_from([1000, 1, 5, 6, 9, 4096, 4097, 16_384, 1 << 20]),
    segment=st.sampled_from([1 << 20, 1, 2, 9, 10, 13, 4095, 4096, 4105, 65_536]),
    is_padded=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_messages_come_back_however_they_are_cut(
    sizes: list[int], frame: int, segment: int, is_padded: bool, seed: int
) -> None:
    chance = random.Random(seed)
    small = min(frame, segment) < 20  # many of the smallest pieces would be taken for an attack
    messages = [chance.randbytes(size if size < 1000 or not small else 1000) for size in sizes]

    def pad() -> int | None:
        return chance.choice([None, 0, 1, 255]) if is_padded else None

    asyncio.run(
        asyncio.wait_for(
            exchange(messages, lambda: chance.randint(1, frame), pad, lambda: chance.randint(1, segment)), 50
        )
    )


def test_a_large_message_is_received_where_it_belongs() -> None:
    """Several times over the memory that a message begins with."""
    message = random.Random(3).randbytes(18 << 20)
    asyncio.run(exchange([message, b"x"], lambda: 1 << 20, lambda: None, lambda: 1 << 18))
