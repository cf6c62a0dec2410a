"""How far the producer of responses may be ahead of the one who reads them."""

from __future__ import annotations

import contextlib
import threading

from headrace.messages.ticket import UNREAD, Ticket


class CreditWindow:
    """Counts the responses of one request that are sent and not yet read, and stops the producer at `UNREAD`.

    A producer that has been stopped goes on once half of them are read: to wake it for each would
    cost a thread switch per response.

    A finalizer may call `open`, in the middle of any other call of its thread. So the gate is a bare
    lock, held while the producer waits, and given back in one step, in the middle of which nothing comes.
    """

    __slots__ = ("_gate", "_is_open", "_read", "_sent", "_turn")

    def __init__(self) -> None:
        self._sent = 0  # written by the producer whose turn it is
        self._read = 0  # written by the reader
        self._is_open = False
        self._turn = threading.Lock()
        self._gate = threading.Lock()

    @classmethod
    def over(cls, ticket: Ticket) -> CreditWindow:
        """A credit window that the caller of ``ticket`` moves by reading, and opens by leaving."""
        window = cls()
        ticket.on_read = lambda _: window.release()
        ticket.on_cancel = lambda _: window.open() if ticket.abandoned else None
        if ticket.abandoned:  # in the meantime, perhaps before `on_cancel` was there
            window.open()
        return window

    def acquire(self) -> None:
        """Wait until one more response may be sent. Any thread but the reader's."""
        with self._turn:
            if self._sent - self._read >= UNREAD:
                self._wait()
            self._sent += 1

    def release(self) -> None:
        """One response has been read. One thread; never blocks."""
        self._read += 1
        if self._gate.locked() and self._sent - self._read <= UNREAD // 2:
            self._wake()

    def open(self) -> None:
        """Let everybody through from now on. Any thread."""
        self._is_open = True
        self._wake()

    def _wait(self) -> None:
        """Return when half of what was sent is read. What is read between two lines here is not missed."""
        self._gate.acquire(blocking=False)
        while not self._is_open and self._sent - self._read > UNREAD // 2:
            self._gate.acquire()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # it is free already
            self._gate.release()
