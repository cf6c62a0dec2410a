"""Sends the metrics at an interval: read on the event loop as for a scrape, written and sent on a thread.

Metrics are cumulative, so a failed export loses only resolution, and is not retried.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from itertools import chain
from time import monotonic, time_ns

from prometheus_client import Metric

from headrace import rate_limited_logger
from headrace_otel.delivery import Delivery
from headrace_otel.metric_messages import MetricMessages

log = rate_limited_logger(__name__)


class MetricSender:
    """Sends what ``read`` returns on the event loop and ``read_devices`` on the thread, every ``interval_s``.

    ``skipped`` counts the exports that were left out, because the collector had not taken the one before.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Metric]],
        make_devices: Callable[[], Callable[[], Iterable[Metric]]],
        messages: MetricMessages,
        delivery: Delivery,
        interval_s: float,
    ) -> None:
        self._read, self._make_devices, self._messages = read, make_devices, messages
        self._delivery, self._interval_s = delivery, interval_s
        self.skipped = 0
        self._loop = asyncio.get_running_loop()
        self._due: tuple[Iterable[Metric], int] | None = None
        self._wake, self._is_closing = threading.Event(), False
        self._is_idle = True
        self._thread = threading.Thread(target=self._run, name="headrace-otel-metrics", daemon=True)
        self._thread.start()
        self._timer = self._loop.call_later(interval_s, self._tick)

    def end(self) -> None:
        """Send the last values. Does not wait."""
        self._timer.cancel()
        self._offer()
        self._is_closing = True
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        """Wait for at most ``timeout_s`` until they are sent."""
        self._thread.join(timeout_s)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        self._offer()

    def _offer(self) -> None:
        if not self._is_idle or monotonic() < self._delivery.not_before:
            self.skipped += 1
            return
        self._is_idle = False
        self._due = self._read(), time_ns()
        self._wake.set()

    def _run(self) -> None:
        devices = self._make_devices()
        while True:
            self._wake.wait()
            self._wake.clear()
            due, self._due = self._due, None
            if due is not None:
                try:
                    self._send(chain(due[0], devices()), due[1])
                except Exception:
                    log.exception("the metrics for the collector are left out this time")
                finally:
                    del due
                    self._is_idle = True
            if self._is_closing and self._due is None:
                break
        self._delivery.close()

    def _send(self, families: Iterable[Metric], now_ns: int) -> None:
        for message in self._messages.write(families, now_ns):
            if self._delivery.send(message) is None:
                break  # the others of this time would fail as well
