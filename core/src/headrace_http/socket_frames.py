"""The frames of a WebSocket's client (RFC 6455, 5.2): refuses a message that is too large by the head of its frame."""

from __future__ import annotations

_FIN, _OPCODE, _CONTROL = 0x80, 0x0F, 0x8
_MASK, _LENGTH = 0x80, 0x7F
#: Bytes of the longer lengths, by the short one.
_EXTENDED = {126: 2, 127: 8}


class SocketFrames:
    """Passes on the frames of messages with at most ``max_bytes``, and nothing after the first one with more."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._head = bytearray()
        self._missing = 0  # bytes of a payload
        self._message_bytes = 0  # in the frames so far
        self.is_too_large = False

    def pass_on(self, data: bytes) -> bytes:
        """Return what the server may read of ``data``."""
        at, size = 0, len(data)
        while at < size and not self.is_too_large:
            if self._missing:
                step = min(self._missing, size - at)
                self._missing -= step
                at += step
                continue
            begin = at
            while at < size and self._wants_more_head():
                self._head.append(data[at])
                at += 1
            if self._wants_more_head():
                break
            if not self._begin_payload():
                return data[:begin]
        return data[:at] if not self.is_too_large else b""

    def _wants_more_head(self) -> bool:
        head = self._head
        if len(head) < 2:
            return True
        length = 2 + _EXTENDED.get(head[1] & _LENGTH, 0) + (4 if head[1] & _MASK else 0)
        return len(head) < length

    def _begin_payload(self) -> bool:
        """Read the complete head. Return False if its message is too large."""
        head, short = self._head, self._head[1] & _LENGTH
        self._missing = int.from_bytes(head[2 : 2 + _EXTENDED[short]], "big") if short in _EXTENDED else short
        is_control, is_last = head[0] & _OPCODE >= _CONTROL, bool(head[0] & _FIN)
        head.clear()
        if not is_control:
            self._message_bytes += self._missing
            self.is_too_large = self._message_bytes > self._max_bytes
            if is_last:
                self._message_bytes = 0
        return not self.is_too_large
