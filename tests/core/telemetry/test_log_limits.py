"""The number of lines of one kind that are written: counted, and by arithmetic."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import pytest

from headrace.telemetry import log_limits
from headrace.telemetry.log_limits import BURST, LogRateLimit, rate_limited_logger

log = logging.getLogger("headrace.test.log_limits")


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> LogRateLimit:
    limit = LogRateLimit()
    monkeypatch.setattr(log, "filters", [limit])
    return limit


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.DEBUG)
    return lambda: [record.getMessage() for record in caplog.records if record.name == log.name]


def complain(times: int, model: str | None = None) -> None:
    for number in range(times):
        log.error("bad request %d", number, extra={} if model is None else {"model": model})


def test_a_flood_is_some_lines_and_a_count(limit: LogRateLimit, lines: Callable[[], list[str]]) -> None:
    complain(10_000)
    assert lines() == [f"bad request {number}" for number in range(BURST)]
    limit.flush()
    assert lines()[BURST:] == [f"{10_000 - BURST} more lines like this were left out: bad request 9999"]


def test_rare_records_are_written_and_not_counted(limit: LogRateLimit, lines: Callable[[], list[str]]) -> None:
    complain(BURST)
    limit.flush()
    assert len(lines()) == BURST


def test_each_place_and_each_model_has_its_own_limit(limit: LogRateLimit, lines: Callable[[], list[str]]) -> None:
    complain(100, "noisy")
    complain(1, "quiet")
    log.warning("from elsewhere")
    assert lines()[BURST:] == ["bad request 0", "from elsewhere"]


def test_a_new_window_begins_with_new_lines(lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "filters", [LogRateLimit(window_s=0.0)])
    complain(BURST)
    complain(BURST)
    assert len(lines()) == 2 * BURST


def test_verbose_lines_are_all_written(limit: LogRateLimit, lines: Callable[[], list[str]]) -> None:
    for number in range(100):
        log.debug("%d", number)
    assert len(lines()) == 100


def test_names_that_callers_choose_take_no_memory(limit: LogRateLimit, lines: Callable[[], list[str]]) -> None:
    for number in range(10_000):
        complain(1, f"model-{number}")
    assert len(limit._kinds) <= 257
    assert len(lines()) <= 257 + BURST


def test_the_count_is_logged_by_a_timer_on_the_loop(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        counted = asyncio.Event()

        def flush_and_tell(self: LogRateLimit) -> None:
            flush(self)
            counted.set()

        monkeypatch.setattr(LogRateLimit, "flush", flush_and_tell)
        monkeypatch.setattr(log, "filters", [LogRateLimit(window_s=0.05)])
        complain(BURST + 3)
        await counted.wait()

    flush = LogRateLimit.flush
    asyncio.run(asyncio.wait_for(scenario(), 20))
    assert lines()[-1].startswith("3 more lines like this were left out: bad request")


def test_the_count_is_logged_by_a_timer_in_a_thread(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]
) -> None:
    monkeypatch.setattr(log, "filters", [LogRateLimit(window_s=0.05)])
    thread = threading.Thread(target=complain, args=(BURST + 3,))
    thread.start()
    thread.join()
    wait_until(lambda: len(lines()) > BURST, "the rest is counted")
    assert lines()[-1].startswith("3 more lines")


def test_threads_lose_no_count(limit: LogRateLimit, lines: Callable[[], list[str]]) -> None:
    threads = [threading.Thread(target=complain, args=(1000,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    limit.flush()
    assert len(lines()) == BURST + 1
    assert lines()[-1].startswith(f"{4000 - BURST} more")


def test_a_long_message_is_not_repeated_in_full(limit: LogRateLimit, lines: Callable[[], list[str]]) -> None:
    for _ in range(BURST + 1):
        log.error("%s", "x" * 10_000)
    limit.flush()
    assert len(lines()[-1]) < 300


def test_a_logger_gets_one_rate_limit() -> None:
    first, second = (
        rate_limited_logger("headrace.test.rate_limited_logger"),
        rate_limited_logger("headrace.test.rate_limited_logger"),
    )
    assert first is second
    assert len([each for each in first.filters if isinstance(each, LogRateLimit)]) == 1


def test_the_end_of_the_log_has_the_counts_of_suppressed_records(
    limit: LogRateLimit, lines: Callable[[], list[str]]
) -> None:
    complain(BURST + 7)
    log_limits.flush()
    assert any(line.startswith("7 more lines") for line in lines())
