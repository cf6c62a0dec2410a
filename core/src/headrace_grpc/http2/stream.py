"""One stream: a request, its answer, and the flow-control windows of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace_grpc.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    HEAD,
    HEADERS,
    MAX_WINDOW,
    NO_ERROR,
    STREAM_CLOSED,
    frame,
    reset,
    window_update,
)
from headrace_grpc.http2.sending import Buffer

if TYPE_CHECKING:
    from headrace_grpc.http2.connection import Connection

#: An answer up to this size is copied into one buffer: that costs less than writing its parts.
_JOINED_BYTES = 32 * 1024
#: A smaller DATA frame, forced by a tiny window, does not allow the peer further idle frames.
_USEFUL_BYTES = 1024
_CLOSING = END_HEADERS | END_STREAM


class Stream:
    """One stream. A subclass handles what arrives, by overriding the methods that do nothing here.

    A stream is closed when both sides have ended, or by a reset. It counts as one of its connection's streams until
    it is closed and no longer `is_busy`.
    """

    __slots__ = (
        "_queue",
        "_queued_bytes",
        "_trailers",
        "connection",
        "granted_bytes",
        "id",
        "is_busy",
        "is_closed",
        "is_counted",
        "is_remote_closed",
        "kept_bytes",
        "receive_window",
        "send_credit",
        "sender",
    )

    def __init__(self, connection: Connection, id: int) -> None:
        self.connection = connection
        self.sender = connection.sender
        self.id = id
        self.is_busy = self.is_closed = self.is_remote_closed = False
        #: Bytes of this stream in the connection's `ConnectionMemory`, if it `is_counted` there.
        self.granted_bytes = self.kept_bytes = 0
        self.is_counted = False
        #: Bytes that it may send beyond ``sender.stream_window``; negative after sending.
        self.send_credit = 0
        self.receive_window = connection.limits.stream_window
        self._queue: deque[memoryview] | None = None
        #: Bytes that were put into the queue since it was empty: their memory is free when the last one was passed on.
        self._queued_bytes: int  # with a queue only
        self._trailers = b""
        connection.streams[id] = self
        connection.active += 1

    @property
    def peer(self) -> str:
        """The IP address of the client; empty if it is unknown."""
        return self.connection.peer

    # ------------------------------------------------------------------ the connection calls

    def data_received(self, data: Buffer, ended: bool) -> None:
        """Handle the next bytes of the body; the last if ``ended``. A memoryview is valid during this call only."""

    def tail(self, size_bytes: int) -> memoryview | None:
        """Return memory for the next bytes of the body, at most ``size_bytes``: the socket writes there. Or None."""
        return None

    def tail_received(self, size_bytes: int, ended: bool) -> None:
        """Handle ``size_bytes`` of the body that were written to the memory of `tail`."""

    def sweep(self, now: float) -> None:
        """End the stream if it takes too long. Called by each sweep."""

    def drained(self) -> None:
        """Called when everything is sent, after `is_blocked` was true."""

    def may_wait(self, size_bytes: int) -> bool:
        """True if an answer of ``size_bytes`` may wait for the peer. If False, the subclass has ended the stream."""
        return True

    def refuse(self, reason: str) -> None:
        """End the stream for ``reason``: there is no memory for its request."""

    def lost(self) -> None:
        """Called when the stream was reset or the connection is lost: nothing more can be sent."""

    def shut_down(self) -> None:
        """The server stops: end the stream if its work has not begun."""

    def terminate(self) -> None:
        """The time to stop is over: end the stream. An answer that is sent here may still reach the peer."""

    def receive(self, data: Buffer, ended: bool) -> None:
        """Subtract ``data`` from the receive window and call `data_received`; reset the stream if it exceeds it."""
        if self.is_remote_closed:
            self.reset(STREAM_CLOSED)
            return
        self.receive_window -= len(data)
        if self.receive_window < 0:
            self.reset(FLOW_CONTROL_ERROR)
            return
        if ended:
            self.is_remote_closed = True
        self.data_received(data, ended)

    def receive_tail(self, size_bytes: int, ended: bool) -> None:
        """Like `receive`, for ``size_bytes`` that were written to the memory of `tail`."""
        self.receive_window -= size_bytes
        if self.receive_window < 0:
            self.reset(FLOW_CONTROL_ERROR)
            return
        if ended:
            self.is_remote_closed = True
        self.tail_received(size_bytes, ended)

    # ------------------------------------------------------------------ the subclass calls

    def credit(self, size_bytes: int) -> None:
        """Let the peer send ``size_bytes`` more, up to the largest window."""
        size_bytes = min(size_bytes, MAX_WINDOW - self.receive_window)
        if size_bytes > 0 and not self.is_remote_closed and not self.is_closed:
            self.receive_window += size_bytes
            self.sender.write(window_update(self.id, size_bytes))

    def respond(self, headers: bytes, prefix: bytes, body: Buffer, trailers: bytes) -> None:
        """Send the whole answer: ``headers``, ``prefix`` and ``body``, ``trailers``. The stream ends with it."""
        sender, number, size = self.sender, self.id, len(prefix) + len(body)
        if size > _JOINED_BYTES or not self._fits(size):
            if self.may_wait(size):
                self.send_headers(headers)
                self.send((prefix, body))
                self.end(trailers)
            return
        self.send_credit -= size
        sender.window -= size
        sender.count += 1
        count = len(trailers)
        sender.write(
            b"".join(
                (
                    HEAD.pack(0, len(headers), HEADERS, END_HEADERS, number),
                    headers,
                    HEAD.pack(size >> 8, size & 255, DATA, 0, number),
                    prefix,
                    body,
                    HEAD.pack(count >> 8, count & 255, HEADERS, _CLOSING, number),
                    trailers,
                )
            )
        )
        self._finish()

    def send_headers(self, block: bytes) -> None:
        self.sender.write(frame(HEADERS, END_HEADERS, self.id, block))

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send ``parts`` of the body as soon as the windows allow. The caller must not change them afterwards."""
        if self._queue is None:
            self._queue, self._queued_bytes = deque(), 0
        self._queue.extend(memoryview(part) for part in parts)
        size = sum(map(len, parts))
        self._queued_bytes += size
        self.sender.send_soon(self, size)

    def end(self, trailers: bytes) -> None:
        """Send ``trailers`` after the body, and close our side."""
        if self._queue:
            self._trailers = trailers
        else:
            self.sender.count += 1
            self.sender.write(frame(HEADERS, _CLOSING, self.id, trailers))
            self._finish()

    def reset(self, code: int) -> None:
        """Close both sides at once, because the peer broke a rule."""
        if not self.is_closed:
            self.sender.write(reset(self.id, code))
            self.close()
            self.lost()
            self.connection.count_fault(self.id)

    def abandon(self, code: int) -> None:
        """Close both sides at once, for a reason that is not a fault of the peer."""
        self.sender.write(reset(self.id, code))
        self.connection.tolerate(self.id)
        self.close()

    def done(self) -> None:
        """Mark the stream as no longer busy: its work has ended."""
        if self.is_busy:
            self.is_busy = False
            if self.is_closed:
                self.connection.released(self)

    @property
    def is_blocked(self) -> bool:
        """True if a part of the body waits for the peer to read."""
        return bool(self._queue)

    # ------------------------------------------------------------------ within this package

    def close(self) -> None:
        """Remove the stream from its connection and drop its queue. Sends nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        self.connection.forget(self, self._queue is not None)
        queue, self._queue = self._queue, None
        if queue:
            self.sender.dequeued(sum(map(len, queue)))
            self._free()

    def send_frame(self) -> bool:
        """Send one DATA frame of the queue. Return True if more waits and another frame may be possible."""
        sender, queue = self.sender, self._queue
        room = min(sender.stream_window + self.send_credit, sender.window, sender.frame_bytes)
        if not queue or room <= 0:
            return False
        size, parts = 0, []
        while queue and size < room:
            part = queue.popleft()
            if len(part) > room - size:
                queue.appendleft(part[room - size :])
                part = part[: room - size]
            parts.append(part)
            size += len(part)
        self.send_credit -= size
        sender.dequeued(size)
        if not queue or size >= _USEFUL_BYTES:
            sender.count += 1
        sender.write_data(HEAD.pack(size >> 8, size & 255, DATA, 0, self.id), parts, size)
        if not queue:
            self._free()
            if self._trailers:
                self.end(self._trailers)
            self.drained()
        return bool(queue)

    def _free(self) -> None:
        size, self._queued_bytes = self._queued_bytes, 0
        self.sender.freed(size)

    def _fits(self, size_bytes: int) -> bool:
        sender = self.sender
        room = min(sender.stream_window + self.send_credit, sender.window, sender.frame_bytes)
        return size_bytes <= room and sender.is_writable

    def _finish(self) -> None:
        """Close the stream after our last frame. If the request is incomplete, tell the peer not to send the rest."""
        if not self.is_remote_closed:
            self.sender.write(reset(self.id, NO_ERROR))
            self.connection.tolerate(self.id)
        self.close()
