"""Keeps the last log records of the process."""

from __future__ import annotations

import logging
from collections import deque
from itertools import count
from typing import Any

#: A longer text is cut.
_MAX_CHARACTERS = 4096


class RecentRecords(logging.Handler):
    """The last ``size`` records but for tables, with numbers that grow. Any thread."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._records: deque[dict[str, Any]] = deque(maxlen=size)
        self._numbers = count(1)

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "table"):  # its text is a heading only
            return
        text = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            text += f"\n{type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        self._records.append(
            {
                "number": next(self._numbers),
                "time": record.created,
                "level": record.levelname,
                "logger": record.name,
                "text": text[:_MAX_CHARACTERS],
            }
        )

    def after(self, number: int) -> list[dict[str, Any]]:
        """Return the records behind ``number``, oldest first; all of them if ``number`` is of an earlier server."""
        records = tuple(self._records)
        if records and records[-1]["number"] < number:
            return list(records)
        return [record for record in records if record["number"] > number]
