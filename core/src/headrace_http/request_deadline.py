"""The header by which a caller says how long it waits: ``Request-Timeout-Ms: 250``.

HTTP has none of its own. This one is read as Connect reads ``Connect-Timeout-Ms``: one to ten digits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from time import monotonic_ns

from headrace.errors import InvalidArgument, Unavailable
from headrace_http.message import Cancel, HttpReply, Reply, error_reply

TIMEOUT = b"request-timeout-ms"
_MOST_DIGITS = 10
#: Of a value that a message shows.
_SHOWN = 40


class RequestDeadline:
    """Takes the answer to a request in place of ``reply``, until the time is over that ``header`` gives it from now on.

    Then it is answered as one that has waited too long in a queue, and cancelled. Raises `InvalidArgument` for a header
    that is none, and `Unavailable` for a time that is over already. Event loop only.
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
        """Who sent the request, on a server with interceptors; None without."""
        return getattr(self._reply, "caller", None)

    def __call__(self, answer: HttpReply) -> None:
        reply, self._reply = self._reply, None
        self._end()
        if reply is not None:
            reply(answer)

    def begin(self, cancel: Cancel) -> Cancel:
        """Let the time run for the request that ``cancel`` cancels. Returns what does so for a caller who has gone."""
        if self._reply is not None:  # it has not been answered meanwhile
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
    """The milliseconds that ``header`` says. Raises `InvalidArgument` for one that says none, `Unavailable` for 0."""
    if not (header.isdigit() and len(header) <= _MOST_DIGITS):
        shown = header[:_SHOWN].decode("latin-1")
        raise InvalidArgument(f"header 'Request-Timeout-Ms' is '{shown}', expected 1 to {_MOST_DIGITS} digits")
    milliseconds = int(header)
    if not milliseconds:
        raise _expired()
    return milliseconds


def deadline_in(headers: Mapping[bytes, bytes]) -> int:
    """When the time is over that ``headers`` give a request from now on, in monotonic nanoseconds; 0 for never. Raises
    as `read_timeout` does."""
    header = headers.get(TIMEOUT)
    return 0 if header is None else monotonic_ns() + read_timeout(header) * 1_000_000


def _expired() -> Unavailable:
    """In the words that Triton has for a queue."""
    return Unavailable("Request timeout expired")
