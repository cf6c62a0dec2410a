"""The last log records."""

from __future__ import annotations

import logging

from headrace_dashboard.recent_records import RecentRecords


def test_the_last_records_are_stored_and_long_texts_are_cut() -> None:
    records = RecentRecords(3)
    log = logging.Logger("headrace.test")
    log.addHandler(records)
    for number in range(5):
        log.warning("%d %s", number, "x" * 10_000)
    found = records.after(0)
    assert [each["number"] for each in found] == [3, 4, 5]
    assert {len(each["text"]) for each in found} == {4096}
    assert records.after(4) == found[2:]


def test_an_error_is_named_without_its_traceback() -> None:
    records = RecentRecords(3)
    log = logging.Logger("headrace.test")
    log.addHandler(records)
    try:
        raise ValueError("so")
    except ValueError:
        log.exception("it failed")
    assert records.after(0)[0]["text"] == "it failed\nValueError: so"


def test_a_reader_from_before_a_restart_gets_all_records() -> None:
    records = RecentRecords(3)
    log = logging.Logger("headrace.test")
    log.addHandler(records)
    log.warning("one")
    assert [each["text"] for each in records.after(1)] == []
    assert [each["text"] for each in records.after(500)] == ["one"]
