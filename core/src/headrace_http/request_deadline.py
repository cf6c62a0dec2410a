"""The header for the time that a caller waits: ``Request-Timeout-Ms: 250``.

HTTP has no such header. This one is read like ``Connect-Timeout-Ms`` of Connect: 1 to 10 digits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic_ns

from headrace.errors import InvalidArgument, Unavailable
from headrace_http.message import Cancel, HttpReply, Reply, error_reply

TIMEOUT = b"request-timeout-ms"
_MOST_DIGITS = 10
#: At most this many characters of a value are shown in a message.
_SHOWN = 40


class RequestDeadline:
    """Takes the answer to a request for ``reply``, until the time in ``header`` is over.

    Then the request is answered like one that has waited too long in a queue, and cancelled. Raises `InvalidArgument`
    for an invalid header, and `Unavailable` for 0 ms. Event loop only.
    """

    __slots__ = ("_cancel", "_delay_s", "_reply", "_timer", "at_ns", "peer")

    def __init__(self, header: bytes, reply: Reply) -> None:
        milliseconds = read_timeout(header)
        self._delay_s = milliseconds / 1000
        #: In monotonic nanoseconds.
        self.at_ns = monotonic_ns() + milliseconds * 1_000_000
        self.peer = getattr(reply, "peer", "")
        self._reply: Reply | None = reply
        self._cancel: Cancel | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def caller(self) -> object:
        """The caller of the request on a server with interceptors; else None."""
        return getattr(self._reply, "caller", None)

    def __call__(self, answer: HttpReply) -> None:
        reply, self._reply = self._reply, None
        self._end()
        if reply is not None:
            reply(answer)

    def begin(self, cancel: Cancel) -> Cancel:
        """Start the time for the request that ``cancel`` cancels. Return a function to call if the caller
        disconnects."""
        if self._reply is not None:  # not answered meanwhile
            self._cancel = cancel
            self._timer = asyncio.get_running_loop().call_later(self._delay_s, self._expire)
        return self._leave

    def _leave(self) -> None:
        cancel = self._cancel
        self._end()
        if cancel is not None:
            cancel()

    def _expire(self) -> None:
        reply, self._reply = self._reply, None
        self._leave()
        if reply is not None:
            reply(error_reply(_expired()))

    def _end(self) -> None:
        self._cancel = None
        if self._timer is not None:
            self._timer.cancel()


def read_timeout(header: bytes) -> int:
    """Return the milliseconds in ``header``. Raises `InvalidArgument` if it is invalid, `Unavailable` for 0."""
    if not (header.isdigit() and len(header) <= _MOST_DIGITS):
        shown = header[:_SHOWN].decode("latin-1")
        raise InvalidArgument(f"header 'Request-Timeout-Ms' is '{shown}', expected 1 to {_MOST_DIGITS} digits")
    milliseconds = int(header)
    if not milliseconds:
        raise _expired()
    return milliseconds


def deadline_in(headers: Mapping[bytes, bytes]) -> int:
    """Return the deadline from ``headers``, in monotonic ns; 0 for none. Raises as `read_timeout` does."""
    header = headers.get(TIMEOUT)
    return 0 if header is None else monotonic_ns() + read_timeout(header) * 1_000_000


def _expired() -> Unavailable:
    """Return the error in Triton's words for a queue."""
    return Unavailable("Request timeout expired")
