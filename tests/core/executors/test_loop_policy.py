"""When an instance moves to the event loop and off it, and for how long. Times are numbers here."""

from __future__ import annotations

import random
import sys
import threading
from pathlib import Path

import pytest

from headrace.executors.loop_policy import (
    AWAY_NS,
    AWAY_TIMES,
    BLOCKED_NS,
    LONG_NS,
    MOST_AWAY_NS,
    SHORT_NS,
    SLOW_NS,
    WINDOW,
    LoopPolicy,
    LoopTime,
)

SECOND = 1_000_000_000
#: Between two executions: they take little of the loop's time.
PAUSE_NS = 10 * SHORT_NS


class PlayedLoopTime(LoopTime):
    """Reports the time that the loop has waited for a core, which the test sets."""

    waited_ns = 0

    def core_wait_ns(self) -> int:
        return self.waited_ns


class Played:
    """A policy, and executions one after the other with pauses."""

    def __init__(self) -> None:
        self.loop_time = PlayedLoopTime()
        self.policy, self.now_ns = LoopPolicy(self.loop_time), 5 * SECOND

    def run(self, took_ns: int, times: int = 1, pause_ns: int = PAUSE_NS) -> bool:
        for _ in range(times):
            self.now_ns += took_ns
            assert self.policy.ran(self.now_ns - took_ns, self.now_ns) is self.policy.on_loop
            self.now_ns += pause_ns
        return self.policy.on_loop

    def come(self) -> None:
        assert self.run(SHORT_NS, WINDOW)

    def wait(self, ns: int) -> None:
        self.now_ns += ns


@pytest.fixture
def played() -> Played:
    return Played()


def test_short_executions_move_to_the_loop_after_a_window_of_them(played: Played) -> None:
    assert not played.run(SHORT_NS, WINDOW - 1)
    assert played.run(SHORT_NS)
    assert played.run(1, 10 * WINDOW)


def test_longer_ones_never_come(played: Played) -> None:
    assert not played.run(SHORT_NS + 1, 100 * WINDOW)


def test_a_quarter_of_short_executions_is_enough_to_move_to_the_loop(played: Played) -> None:
    assert not played.run(BLOCKED_NS, WINDOW - WINDOW // 4 + 1)
    assert not played.run(SHORT_NS, WINDOW // 4 - 1)
    assert not played.run(BLOCKED_NS, WINDOW - WINDOW // 4)
    assert played.run(SHORT_NS, WINDOW // 4)


def test_instance_that_has_blocked_lately_does_not_move_to_the_loop(played: Played) -> None:
    assert not played.run(BLOCKED_NS + 1)
    assert not played.run(SHORT_NS, WINDOW - 1)
    assert played.run(SHORT_NS, WINDOW)


def test_one_long_execution_moves_the_instance_off_the_loop(played: Played) -> None:
    played.come()
    assert played.run(LONG_NS)
    assert not played.run(LONG_NS + 1)


def test_execution_of_a_second_after_an_hour_of_short_ones_delays_the_loop_once(played: Played) -> None:
    played.come()
    hour_ns, pause_ns = 3600 * SECOND, 50_000_000
    assert played.run(SHORT_NS, hour_ns // (SHORT_NS + pause_ns), pause_ns=pause_ns)
    assert not played.run(SECOND)
    for _ in range(AWAY_TIMES - 1):  # on its thread, where it delays no other model, longer than it must stay
        assert not played.run(SECOND)
        assert not played.run(SHORT_NS, WINDOW - 1)
    assert not played.run(SECOND)
    assert not played.run(SHORT_NS, WINDOW - 1)
    assert played.run(SHORT_NS, WINDOW)


def test_half_a_window_of_slow_executions_moves_the_instance_off_the_loop(played: Played) -> None:
    played.come()
    assert played.run(SLOW_NS + 1, WINDOW // 2)
    assert played.run(1, WINDOW // 2)
    assert played.run(1, WINDOW // 2 - 1)
    assert not played.run(SLOW_NS + 1, WINDOW // 2 + 1)


def test_executions_that_a_busy_machine_makes_twice_as_long_stay_on_the_loop(played: Played) -> None:
    played.come()
    assert played.run(2 * SHORT_NS, 100 * WINDOW)


def test_wait_of_a_long_execution_for_a_core_does_not_count(played: Played) -> None:
    played.come()
    for _ in range(3 * WINDOW):
        played.loop_time.waited_ns += SECOND
        assert played.run(SECOND + SHORT_NS)
    assert played.loop_time.spent_ns == 3 * WINDOW * SHORT_NS


def test_an_execution_that_is_long_without_its_wait_moves_the_instance_off_the_loop(played: Played) -> None:
    played.come()
    played.loop_time.waited_ns += SECOND
    assert not played.run(SECOND + LONG_NS + 1)


def test_a_wait_excuses_one_long_execution(played: Played) -> None:
    played.come()
    played.loop_time.waited_ns += 10 * SECOND
    assert played.run(2 * SECOND)
    assert not played.run(2 * SECOND)


@pytest.mark.parametrize("executions", [0, WINDOW])
def test_a_wait_before_the_window_excuses_nothing(played: Played, executions: int) -> None:
    played.loop_time.waited_ns = SECOND
    played.come()
    played.loop_time.waited_ns += SECOND if executions else 0
    assert played.run(SHORT_NS, executions)
    assert not played.run(SECOND)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how long a thread waited for a core")
def test_the_wait_is_that_of_the_thread_that_made_it_as_the_kernel_counts_it() -> None:
    kernels = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    loop_time, waits_ns = LoopTime(), []

    def waited_ns() -> int:
        return int(kernels.read_text().split()[1])

    before_ns = waited_ns()
    thread = threading.Thread(target=lambda: waits_ns.append(loop_time.core_wait_ns()))
    thread.start()
    thread.join()
    assert before_ns <= waits_ns[0] <= waited_ns()
    assert before_ns > 0


def test_instance_that_would_take_half_of_the_loops_time_moves_off_it(played: Played) -> None:
    played.come()
    assert played.run(SHORT_NS, WINDOW, pause_ns=SHORT_NS * 11 // 10)
    assert not played.run(SHORT_NS, WINDOW, pause_ns=SHORT_NS * 9 // 10)


def test_instance_moves_off_the_loop_if_all_together_take_half_of_its_time(played: Played) -> None:
    played.come()
    assert played.run(SHORT_NS, WINDOW)
    played.loop_time.spent_ns += WINDOW * (SHORT_NS + PAUSE_NS) // 2 - 2 * WINDOW * SHORT_NS
    assert played.run(SHORT_NS, WINDOW)  # spent before this window
    assert played.run(SHORT_NS)
    played.loop_time.spent_ns += WINDOW * (SHORT_NS + PAUSE_NS) // 2
    assert not played.run(SHORT_NS, WINDOW - 1)


def test_instance_stays_off_the_loop_a_hundred_times_as_long_as_it_took(played: Played) -> None:
    played.come()
    assert not played.run(SECOND, pause_ns=0)
    played.wait(AWAY_TIMES * SECOND - WINDOW * SHORT_NS - 1)
    assert not played.run(SHORT_NS, WINDOW, pause_ns=0)
    assert played.run(SHORT_NS, WINDOW, pause_ns=0)


def test_instance_that_soon_moves_off_again_stays_away_twice_as_long_each_time(played: Played) -> None:
    away: list[int] = []
    for _ in range(15):
        left_ns = played.now_ns
        while not played.run(SHORT_NS, WINDOW):
            pass
        away.append(played.now_ns - left_ns)
        assert not played.run(LONG_NS + 1)
    window_ns = WINDOW * (SHORT_NS + PAUSE_NS) + LONG_NS + 1 + PAUSE_NS
    for turn, ns in enumerate(away[1:]):
        assert abs(ns - min(AWAY_NS << turn, MOST_AWAY_NS)) <= 2 * window_ns


def test_instance_that_stays_on_the_loop_as_long_as_it_was_away_starts_anew(played: Played) -> None:
    for _ in range(5):
        played.come()
        assert not played.run(LONG_NS + 1)
        played.wait(MOST_AWAY_NS)
    played.come()
    played.wait(MOST_AWAY_NS)
    assert not played.run(LONG_NS + 1)
    played.wait(AWAY_NS)
    played.come()


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_executions_take_the_loop_is_late_for_little_of_its_time(played: Played, seed: int) -> None:
    chance, late_ns, longest_ns = random.Random(seed), 0, 0
    began_ns = played.now_ns
    for _ in range(20_000):
        took_ns = chance.choice([chance.randrange(1, SHORT_NS)] * 200 + [chance.randrange(LONG_NS, SECOND)])
        if played.policy.on_loop and took_ns > LONG_NS:
            late_ns += took_ns
            longest_ns = max(longest_ns, took_ns)
        played.run(took_ns, pause_ns=chance.randrange(PAUSE_NS))
    assert 0 < late_ns <= (played.now_ns - began_ns) / AWAY_TIMES + longest_ns
