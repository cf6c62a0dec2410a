"""A process that does not answer its pings is lost at the right beat; no other process is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace_processes.supervision.heartbeat import DelayedCall, Heartbeat
from headrace_testing.simulated_parts import ManualClock


class Patient:
    """Records pings and losses. Time stands still until the test advances ``clock``."""

    def __init__(self, max_missed: int = 3) -> None:
        self.clock = ManualClock()
        self.pings = self.lost = 0
        self.heart = Heartbeat(self._later, self._ask, self._lose, max_missed)

    def _later(self, delay_s: float, call: Callable[[], None]) -> DelayedCall:
        return self.clock.call_later(int(delay_s * 1e9), call)

    def _ask(self) -> None:
        self.pings += 1

    def _lose(self) -> None:
        self.lost += 1

    def live(self, seconds: float) -> None:
        self.clock.advance(int(seconds * 1e9))


def test_process_that_answers_is_pinged_every_second_and_never_lost() -> None:
    patient = Patient()
    for second in range(1, 100):
        patient.live(1)
        assert patient.pings == second
        patient.heart.answered()
    assert patient.lost == 0


def test_process_that_does_not_answer_is_pinged_once_and_lost_after_the_limit() -> None:
    patient = Patient(max_missed=3)
    patient.live(1)
    assert patient.heart.is_waiting
    patient.live(2.9)
    assert (patient.pings, patient.lost) == (1, 0)
    patient.live(0.1)
    assert (patient.pings, patient.lost) == (1, 1)
    patient.live(100)
    assert (patient.pings, patient.lost) == (1, 1)


@pytest.mark.parametrize("missed", [1, 2])
def test_late_answer_resets_the_missed_beats(missed: int) -> None:
    patient = Patient(max_missed=3)
    for _ in range(5):
        patient.live(1 + missed)
        patient.heart.answered()
    assert patient.lost == 0
    patient.live(3.9)
    assert patient.lost == 0
    patient.live(0.1)
    assert patient.lost == 1


def test_ended_heartbeat_reports_no_loss() -> None:
    patient = Patient()
    patient.live(2)
    patient.heart.end()
    patient.live(100)
    assert patient.lost == 0
    assert patient.clock.pending == 0
