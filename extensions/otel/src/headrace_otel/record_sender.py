"""Sends log lines and access records on its own thread. A record waits 1 s for others."""

from __future__ import annotations

import threading
from time import monotonic
from typing import Any

from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from headrace import FinishedInference, rate_limited_logger
from headrace_otel.access_records import AccessRecord
from headrace_otel.delivery import Delivery
from headrace_otel.log_lines import LogLine
from headrace_otel.log_messages import write_records
from headrace_otel.record_queue import RecordQueue

log = rate_limited_logger(__name__)

#: Records that are sent at once, and the time for which the first one waits.
_AT_ONCE, _DELAY_S = 1024, 1.0


class RecordSender:
    """Sends the records of ``queue``. ``dropped`` counts those that had no room or were refused."""

    def __init__(self, queue: RecordQueue, delivery: Delivery, resource: Resource) -> None:
        self._queue, self._delivery, self._resource = queue, delivery, resource
        self.sent = self._refused = 0
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-otel-logs", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        return self._queue.dropped + self._refused + self._delivery.rejected

    def end(self) -> None:
        """Send what waits. Does not wait."""
        self._is_closing.set()
        self._queue.has_many.set()

    def join(self, timeout_s: float) -> None:
        """Wait for at most ``timeout_s`` until it is sent."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._queue.has_many.wait(_DELAY_S)
            self._queue.has_many.clear()
            while records := self._queue.pop(_AT_ONCE):
                self._send(records)
        if records := self._queue.pop(_AT_ONCE):
            self._send(records)
        self._delivery.close()

    def _send(self, records: list[tuple[Any, ...]]) -> None:
        """Send ``records``, and retry as long as the collector requests it. Other records wait in the queue."""
        try:
            message = write_records(map(_named, records), self._resource)
        except Exception:
            self._refused += len(records)
            log.exception("log records for the collector are dropped")
            return
        while (taken := self._delivery.send(message)) is None and not self._is_closing.is_set():
            self._is_closing.wait(max(self._delivery.not_before - monotonic(), 0.0))
        if taken:
            self.sent += len(records)
        else:
            self._refused += len(records)


def _named(record: tuple[Any, ...]) -> LogLine | AccessRecord:
    """Return ``record``, which core may have made, with names."""
    if isinstance(record, LogLine | AccessRecord):
        return record
    finished = FinishedInference._make(record)
    return AccessRecord(finished, "infer", int(finished.code is None))
