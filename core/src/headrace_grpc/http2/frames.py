"""The frames of HTTP/2 as bytes: kinds, flags, error codes (RFC 9113, sections 4, 6 and 7)."""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

#: The first bytes that a client sends.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

#: Flags. 0x1 is END_STREAM on DATA and HEADERS, and ACK on SETTINGS and PING.
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR = 0, 1, 2, 3
STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM, CANCEL = 5, 6, 7, 8
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11

ENABLE_PUSH, MAX_CONCURRENT_STREAMS, INITIAL_WINDOW_SIZE = 2, 3, 4
MAX_FRAME_SIZE, MAX_HEADER_LIST_SIZE = 5, 6

#: Values until the peer's SETTINGS change them.
DEFAULT_WINDOW = 65535
DEFAULT_FRAME_BYTES = 16384
#: The largest window and the largest stream id.
MAX_WINDOW = LAST_ID = 2**31 - 1

#: The head of a frame: size >> 8, size & 255, kind, flags, stream id.
HEAD = Struct(">HBBBL")
HEAD_BYTES = 9
_SETTING = Struct(">HL")
_NUMBER = Struct(">L")
_GOODBYE = Struct(">LL")


class ConnectionFault(Exception):
    """The peer broke a rule, and the connection must end. ``code`` is the error code for the GOAWAY frame."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload)
    return HEAD.pack(size >> 8, size & 255, kind, flags, stream) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    return list(_SETTING.iter_unpack(payload))


def reset(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, _NUMBER.pack(code))


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, _NUMBER.pack(increment))


def goaway(last: int, code: int, reason: str = "") -> bytes:
    return frame(GOAWAY, 0, 0, _GOODBYE.pack(last, code) + reason.encode())
