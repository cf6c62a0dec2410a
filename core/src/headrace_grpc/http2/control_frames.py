"""MethodServices of the frames that carry neither headers nor data."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace_grpc.http2 import frames
from headrace_grpc.http2.frames import (
    ACK,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    MAX_WINDOW,
    PROTOCOL_ERROR,
    ConnectionFault,
)

if TYPE_CHECKING:
    from headrace_grpc.http2.connection import Connection
    from headrace_grpc.http2.stream import Stream


def _settings(connection: Connection, flags: int, id: int, payload: bytes) -> None:
    if id:
        raise ConnectionFault(PROTOCOL_ERROR, "SETTINGS on a stream")
    if len(payload) % 6 or (flags & ACK and payload):
        raise ConnectionFault(FRAME_SIZE_ERROR, "SETTINGS of a wrong size")
    if flags & ACK:
        return
    if len(payload) > 6 * connection.limits.settings:
        raise ConnectionFault(frames.ENHANCE_YOUR_CALM, "too many settings")
    # The ACK precedes the data that larger windows permit: gRPC's core uses the old windows until it reads the ACK.
    connection.sender.write(frames.frame(frames.SETTINGS, ACK, 0, b""))
    # The last value of each setting wins (RFC 9113, section 6.5.3).
    for name, value in dict(frames.read_settings(payload)).items():
        _apply(connection, name, value)


def _apply(connection: Connection, name: int, value: int) -> None:
    if name == frames.INITIAL_WINDOW_SIZE:
        if value > MAX_WINDOW:
            raise ConnectionFault(FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE out of range")
        connection.peer_window_changed(value)
    elif name == frames.MAX_FRAME_SIZE:
        if not frames.DEFAULT_FRAME_BYTES <= value < 2**24:
            raise ConnectionFault(PROTOCOL_ERROR, "MAX_FRAME_SIZE out of range")
        connection.sender.frame_bytes = value
    elif name == frames.ENABLE_PUSH and value > 1:
        raise ConnectionFault(PROTOCOL_ERROR, "ENABLE_PUSH out of range")


def _ping(connection: Connection, flags: int, id: int, payload: bytes) -> None:
    if id:
        raise ConnectionFault(PROTOCOL_ERROR, "PING on a stream")
    if len(payload) != 8:
        raise ConnectionFault(FRAME_SIZE_ERROR, "PING of a wrong size")
    if flags & ACK:
        connection.lifetime.ping_answered(payload)
    else:
        connection.lifetime.ping_received(payload)


def _window_update(connection: Connection, flags: int, id: int, payload: bytes) -> None:
    """Enlarge the send window of the connection or of one stream. gRPC's core sends two of these with every request."""
    increment = _number(payload) & MAX_WINDOW
    sender, stream = connection.sender, connection.streams.get(id)
    if not id:
        sender.window += increment
        if not increment or sender.window > MAX_WINDOW:
            code = FLOW_CONTROL_ERROR if increment else PROTOCOL_ERROR
            raise ConnectionFault(code, "WINDOW_UPDATE of 0, or beyond the largest window")
        if sender.waiting:
            sender.mark_all_due()
    elif stream is None:
        _require_opened(connection, id)
    else:
        stream.send_credit += increment
        if not increment or stream.send_credit > sender.most_credit:
            _stretch(stream, increment)
        if sender.waiting:
            sender.mark_due(stream)


def _stretch(stream: Stream, increment: int) -> None:
    """Check an increment that is 0 or makes this the largest window so far; reset the stream if it is not allowed."""
    sender = stream.sender
    if not increment or sender.stream_window + stream.send_credit > MAX_WINDOW:
        stream.reset(FLOW_CONTROL_ERROR if increment else PROTOCOL_ERROR)
    else:
        sender.most_credit = stream.send_credit


def _rst_stream(connection: Connection, flags: int, id: int, payload: bytes) -> None:
    _number(payload)
    _require_opened(connection, id)
    stream = connection.streams.get(id)
    if stream is None:
        connection.reset_received(id)
    else:
        connection.allowance.count_reset()
        stream.close()
        stream.lost()


def _priority(connection: Connection, flags: int, id: int, payload: bytes) -> None:
    """Check the frame. It has no effect otherwise (RFC 9113, section 5.3)."""
    if not id:
        raise ConnectionFault(PROTOCOL_ERROR, "PRIORITY without a stream")
    if len(payload) == 5:
        return
    if id > connection.last_id:
        raise ConnectionFault(FRAME_SIZE_ERROR, "PRIORITY of a wrong size on an idle stream")
    stream = connection.streams.get(id)
    if stream is None:
        connection.refuse(id, FRAME_SIZE_ERROR)
    else:
        stream.reset(FRAME_SIZE_ERROR)


def _push_promise(connection: Connection, flags: int, id: int, payload: bytes) -> None:
    raise ConnectionFault(PROTOCOL_ERROR, "PUSH_PROMISE from a client")


def _goaway(connection: Connection, flags: int, id: int, payload: bytes) -> None:
    """Answer the open calls, then close: the client will open no more."""
    if id:
        raise ConnectionFault(PROTOCOL_ERROR, "GOAWAY on a stream")
    if len(payload) < 8:
        raise ConnectionFault(FRAME_SIZE_ERROR, "GOAWAY of a wrong size")
    connection.lifetime.shut_down()


def _number(payload: bytes) -> int:
    if len(payload) != 4:
        raise ConnectionFault(FRAME_SIZE_ERROR, "frame of a wrong size")
    return int.from_bytes(payload, "big")


def _require_opened(connection: Connection, id: int) -> None:
    if not 0 < id <= connection.last_id:
        raise ConnectionFault(PROTOCOL_ERROR, "frame on an idle stream")


HANDLERS: dict[int, Callable[[Connection, int, int, bytes], None]] = {
    frames.PRIORITY: _priority,
    frames.RST_STREAM: _rst_stream,
    frames.SETTINGS: _settings,
    frames.PUSH_PROMISE: _push_promise,
    frames.PING: _ping,
    frames.GOAWAY: _goaway,
    frames.WINDOW_UPDATE: _window_update,
}
