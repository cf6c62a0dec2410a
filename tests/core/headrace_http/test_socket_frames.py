"""The bound of a message, before it is buffered. wsproto writes the frames."""

from __future__ import annotations

import pytest
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, Event, Ping, TextMessage

from headrace_http.socket_frames import SocketFrames


def frames(*events: Event) -> bytes:
    client = Connection(ConnectionType.CLIENT)
    return b"".join(client.send(event) for event in events)


def passed(guard: SocketFrames, data: bytes, step: int) -> bytes:
    return b"".join(guard.pass_on(data[at : at + step]) for at in range(0, len(data), step))


@pytest.mark.parametrize("step", [1, 3, 1000, 1_000_000])
def test_messages_up_to_the_limit_pass_unchanged(step: int) -> None:
    data = frames(
        TextMessage(data="x" * 100), Ping(payload=b"y" * 125), BytesMessage(data=bytes(200)),
        BytesMessage(data=bytes(150), message_finished=False), Ping(), BytesMessage(data=bytes(50)),
        BytesMessage(data=b""), TextMessage(data="z" * 200),
    )  # fmt: skip
    guard = SocketFrames(200)
    assert passed(guard, data, step) == data
    assert not guard.is_too_large


@pytest.mark.parametrize("step", [1, 3, 1_000_000])
@pytest.mark.parametrize("size", [201, 70_000])
def test_nothing_of_a_larger_message_nor_after_it_passes(size: int, step: int) -> None:
    before = frames(TextMessage(data="x" * 100))
    guard = SocketFrames(200)
    found = passed(guard, before + frames(BytesMessage(data=bytes(size)), TextMessage(data="after")), step)
    assert guard.is_too_large
    assert found.startswith(before)
    assert len(found) < len(before) + 14, "at most a part of its head"


def test_the_frames_of_one_message_count_together() -> None:
    half = frames(BytesMessage(data=bytes(150), message_finished=False))
    guard = SocketFrames(200)
    assert guard.pass_on(half) == half
    assert guard.pass_on(frames(BytesMessage(data=bytes(51)))) == b""
    assert guard.is_too_large
