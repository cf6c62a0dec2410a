"""Sends messages to the collector. Logs its first failure and its recovery. One thread."""

from __future__ import annotations

from time import monotonic
from typing import Any, Protocol

from google.protobuf.message import DecodeError

from headrace import rate_limited_logger
from headrace_otel.collectors import Collector, NotTaken

log = rate_limited_logger(__name__)

#: First and longest pause after a failure, in seconds; each is twice the one before.
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0


class _ExportAnswer(Protocol):
    """The class of the answers of a signal."""

    @staticmethod
    def FromString(data: bytes) -> Any: ...  # noqa: N802


class Delivery:
    """``signal`` is "metrics" or "logs", ``answer`` the class of its answers.

    ``sent`` and ``failed`` count messages, ``not_before`` is the monotonic time at which the next may be sent.
    """

    def __init__(self, collector: Collector, signal: str, answer: _ExportAnswer, rejected: str) -> None:
        self._collector, self._signal, self._answer, self._rejected_field = collector, signal, answer, rejected
        self.sent = self.failed = self.rejected = 0
        self.not_before = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._is_failing = self._has_said_rejected = False

    def send(self, message: bytes) -> bool | None:
        """Send ``message``. Return True if it was accepted, None if it may be retried later, False if not."""
        try:
            answer = self._collector.send(self._signal, message)
        except NotTaken as refusal:
            self.failed += 1
            self._fail(refusal)
            return None if refusal.is_repeatable else False
        self.sent += 1
        self._pause_s, self.not_before = FIRST_PAUSE_S, 0.0
        if self._is_failing:
            self._is_failing = False
            log.warning("the collector of OpenTelemetry takes %s again", self._signal)
        self._read(answer)
        return True

    def close(self) -> None:
        self._collector.close()

    def _fail(self, refusal: NotTaken) -> None:
        self.not_before = monotonic() + (refusal.pause_s or self._pause_s)
        self._pause_s = min(self._pause_s * 2, LAST_PAUSE_S)
        if not self._is_failing:
            self._is_failing = True
            log.warning("the collector of OpenTelemetry does not take %s: %s", self._signal, refusal)

    def _read(self, answer: bytes) -> None:
        """Count what the collector has rejected of a message that it has taken."""
        try:
            partial = self._answer.FromString(answer).partial_success
        except DecodeError:
            return
        count = getattr(partial, self._rejected_field)
        self.rejected += max(count, 0)
        if count > 0 and not self._has_said_rejected:
            self._has_said_rejected = True
            words = partial.error_message[:200]
            log.warning("the collector of OpenTelemetry rejects %d of the %s: %s", count, self._signal, words)
