"""The deadline of an HTTP caller: one answer, at its time or before, and the request is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic_ns
from typing import Any

import pytest

from headrace.errors import InvalidArgument, Unavailable
from headrace_http.message import HttpReply
from headrace_http.request_deadline import RequestDeadline, deadline_in, read_timeout

ANSWER = HttpReply(200, ())


class Request:
    """A request with ``header``: its answers, and how often it was cancelled."""

    def __init__(self, header: bytes) -> None:
        self.answers: list[HttpReply] = []
        self.cancelled = 0
        self.deadline = RequestDeadline(header, self.answers.append)

    def begin(self) -> Callable[[], object]:
        return self.deadline.begin(self.cancel)

    def cancel(self) -> None:
        self.cancelled += 1


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_a_request_without_an_answer_expires_once() -> None:
    async def scenario() -> None:
        began = monotonic_ns()
        request = Request(b"20")
        assert began + 20_000_000 <= request.deadline.at_ns <= monotonic_ns() + 20_000_000
        leave = request.begin()
        await until(lambda: request.answers)
        assert monotonic_ns() - began >= 19_000_000
        (answer,) = request.answers
        assert (answer.status, b"Request timeout expired" in b"".join(answer.parts)) == (503, True)
        assert request.cancelled == 1
        request.deadline(ANSWER)  # too late
        leave()
        assert (len(request.answers), request.cancelled) == (1, 1)

    run(scenario)


def test_an_answer_in_time_ends_the_timer() -> None:
    async def scenario() -> None:
        answered, other = Request(b"20"), Request(b"40")
        answered.begin()
        other.begin()
        answered.deadline(ANSWER)
        await until(lambda: other.answers)
        assert (answered.answers, answered.cancelled) == ([ANSWER], 0)

    run(scenario)


def test_an_answer_before_the_start_begins_no_timer() -> None:
    async def scenario() -> None:
        request, other = Request(b"1"), Request(b"20")
        request.deadline(ANSWER)
        leave = request.begin()
        other.begin()
        await until(lambda: other.answers)
        leave()
        assert (request.answers, request.cancelled) == ([ANSWER], 0)

    run(scenario)


def test_a_caller_that_disconnects_cancels_and_gets_no_answer() -> None:
    async def scenario() -> None:
        request, other = Request(b"1"), Request(b"20")
        request.begin()()
        other.begin()
        await until(lambda: other.answers)
        assert (request.answers, request.cancelled) == ([], 1)

    run(scenario)


@pytest.mark.parametrize("header", [b"", b"-1", b"1.5", b"1e3", b" 1", b"12345678901", b"x" * 100_000, b"\xb2"])
def test_a_header_that_is_no_number_is_refused(header: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"header 'Request-Timeout-Ms' is .*, expected 1 to 10 digits") as refused:
        read_timeout(header)
    assert len(refused.value.message) < 200


def test_no_time_is_over_at_once() -> None:
    with pytest.raises(Unavailable, match="Request timeout expired"):
        read_timeout(b"000")
    assert read_timeout(b"0250") == 250
    assert deadline_in({}) == 0
    now = monotonic_ns()
    assert now < deadline_in({b"request-timeout-ms": b"9999999999"}) <= monotonic_ns() + 9_999_999_999 * 1_000_000
