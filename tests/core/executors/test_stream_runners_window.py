"""A producer is stopped at `UNREAD` responses. It resumes when they are read, or when the client disconnects."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from headrace.executors.stream_runners import CreditWindow
from headrace.messages.ticket import UNREAD
from tests.core.conftest import make_ticket

if TYPE_CHECKING:
    from tests.core.conftest import Interrupted


class Producer:
    """Acquires ``count`` times on a thread of its own, and publishes its progress."""

    def __init__(self, window: CreditWindow, count: int) -> None:
        self.sent = 0
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._produce, args=(window, count), daemon=True)
        self._thread.start()

    def _produce(self, window: CreditWindow, count: int) -> None:
        for _ in range(count):
            window.acquire()
            with self._moved:
                self.sent += 1
                self._moved.notify_all()

    def wait_for(self, sent: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: self.sent >= sent, 10), self.sent

    def is_stopped_at(self, sent: int) -> bool:
        """Return True if it stops at ``sent`` for a tenth of a second."""
        self.wait_for(sent)
        with self._moved:
            return not self._moved.wait_for(lambda: self.sent > sent, 0.1)

    def ends(self) -> bool:
        self._thread.join(10)
        return not self._thread.is_alive()


def test_a_producer_is_stopped_at_the_limit_and_resumes_when_half_is_read() -> None:
    window = CreditWindow()
    producer = Producer(window, 3 * UNREAD)
    assert producer.is_stopped_at(UNREAD)
    for _ in range(UNREAD // 2 - 1):
        window.release()
    assert producer.is_stopped_at(UNREAD)
    window.release()
    assert producer.is_stopped_at(UNREAD + UNREAD // 2)


def test_a_producer_whose_responses_are_all_read_ends_and_is_never_more_than_the_limit_ahead() -> None:
    window = CreditWindow()
    producer = Producer(window, 50 * UNREAD)
    for read in range(50 * UNREAD):
        producer.wait_for(read + 1)
        assert producer.sent - read <= UNREAD
        window.release()
    assert producer.ends()


def test_two_producers_share_one_limit() -> None:
    window, sent = CreditWindow(), threading.Semaphore(0)

    def produce() -> None:
        for _ in range(UNREAD):
            window.acquire()
            sent.release()

    for _ in range(2):
        threading.Thread(target=produce, daemon=True).start()
    for _ in range(UNREAD):
        assert sent.acquire(timeout=10)
    assert not sent.acquire(timeout=0.1)
    for _ in range(UNREAD):
        window.release()
    for _ in range(UNREAD):
        assert sent.acquire(timeout=10)
    assert not sent.acquire(timeout=0.1)


def test_cancelling_the_request_lets_a_stopped_producer_through() -> None:
    ticket = make_ticket()
    producer = Producer(CreditWindow.over(ticket), 10 * UNREAD)
    assert producer.is_stopped_at(UNREAD)
    ticket.cancel()
    assert producer.ends()


def test_a_window_of_a_cancelled_request_does_not_stop_its_producer() -> None:
    ticket = make_ticket()
    ticket.cancel()
    assert Producer(CreditWindow.over(ticket), 10 * UNREAD).ends()


def test_reading_the_request_moves_the_window() -> None:
    ticket = make_ticket()
    producer = Producer(CreditWindow.over(ticket), 2 * UNREAD)
    assert producer.is_stopped_at(UNREAD)
    for _ in range(UNREAD):
        ticket.read()
    assert producer.ends()


def test_a_finalizer_may_open_the_window_in_the_middle_of_any_call(interrupted: Interrupted) -> None:
    window = CreditWindow()

    def call() -> None:
        for _ in range(UNREAD):
            window.acquire()
        window.open()
        window.acquire()
        window.release()

    assert interrupted(call, window.open) > UNREAD
