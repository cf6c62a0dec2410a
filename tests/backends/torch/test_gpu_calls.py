"""Calls that overlap on a GPU that the host plays: order, copies, and when the next batch is taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch

from headrace import BackendError, StackedTensors
from headrace_torch.gpu_calls import PINNED_FROM, GpuCalls
from headrace_torch.torch_process import not_capturing
from tests.backends.torch.played_cuda import Played


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Played:
    return Played(monkeypatch)


def x(value: float, rows: int = 1) -> Any:
    return np.full((rows, 4), value, np.float32)


def test_a_call_starts_while_another_one_computes(scene: Played) -> None:
    assert scene.instance.concurrency == 2
    scene.runs_until_finish = True
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(scene.call, x(1))
        wait_for(lambda: len(scene.gates) == 1)
        second = threads.submit(scene.call, x(2))
        wait_for(lambda: len(scene.gates) == 2)
        assert not first.done()
        scene.gates[1].set()
        assert not second.done()  # it computes after the first
        scene.finish()
        np.testing.assert_array_equal(first.result(10), x(2))
        np.testing.assert_array_equal(second.result(10), x(4))
    assert scene.torch.current[0] is not scene.stream, "copies have streams of their own"


def test_results_stay_in_pinned_memory_until_their_last_reader_releases_them(scene: Played) -> None:
    found = [scene.call(x(value)) for value in range(3)]
    assert all(any(np.shares_memory(each, block) for block in scene.pinned) for each in found)
    assert [each[0, 0] for each in found] == [0, 2, 4]
    blocks = len(scene.pinned)
    del found
    for value in range(10):
        assert scene.call(x(value))[0, 3] == 2 * value
    assert len(scene.pinned) == blocks


def test_many_rows_of_several_requests_are_copied_to_pinned_memory(scene: Played) -> None:
    few: Any = StackedTensors([x(1), x(2, 2)])
    np.testing.assert_array_equal(scene.call(few), np.concatenate([x(2), x(4, 2)]))
    sizes = {block.nbytes for block in scene.pinned}
    assert max(sizes) < PINNED_FROM
    rows = PINNED_FROM // 16
    many: Any = StackedTensors([x(1, rows - 1), x(2)])
    for _ in range(5):
        found = scene.call(many)
        assert (found[0, 0], found[-1, 0], len(found)) == (2, 4, rows)
    assert [block.nbytes for block in scene.pinned].count(PINNED_FROM) <= 3


def test_a_call_that_fails_disturbs_no_other(scene: Played) -> None:
    with pytest.raises(BackendError, match="unlucky"):
        scene.call(x(13))
    np.testing.assert_array_equal(scene.call(x(3)), x(6))


def test_the_next_batch_is_taken_shortly_before_the_end(scene: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = self_of(scene.instance.wait_to_take)
    assert at_once(scene.instance.wait_to_take), "nothing computes"
    calls._row_s = {5: 0.01}  # 32 rows take 0.32 s
    calls._start_s, calls._overlaps = 0.05, True
    scene.runs_until_finish = True
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(scene.call, x(1, 32))
        wait_for(lambda: calls._last is not None)
        began = monotonic()
        assert scene.instance.wait_to_take() == 2
        assert 0.2 < monotonic() - began < 2
        assert not first.done()
        calls._row_s = {5: 1000.0}
        second = threads.submit(scene.call, x(1, 32))
        wait_for(lambda: len(scene.gates) == 2)
        third = threads.submit(scene.instance.wait_to_take)
        scene.finish()
        first.result(10)
        assert not third.done()
        scene.finish()
        second.result(10)
        third.result(10)  # it ended before it was expected to
    assert calls._row_s[5] < 1000


def test_batches_overlap_if_they_compute_longer_than_they_are_started(scene: Played) -> None:
    """Else one large batch is better than two small ones, and the next one is taken after the end."""
    calls = self_of(scene.instance.wait_to_take)
    scene.runs_until_finish = True
    with ThreadPoolExecutor(2) as threads:
        for launch_s, gpu_s, overlaps in ((0.0, 0.02, True), (10.0, 0.0, False), (0.0, 0.02, True), (10.0, 0.0, False)):
            done = threads.submit(scene.call, x(1, 32))
            wait_for(lambda: len(scene.gates) == 1)
            calls._launch_s = launch_s
            threading.Event().wait(gpu_s)
            scene.finish()
            done.result(10)
            assert calls._overlaps is overlaps
        assert scene.instance.wait_to_take() == 1
        calls._row_s = {5: 1000.0}
        last = threads.submit(scene.call, x(1, 32))
        wait_for(lambda: len(scene.gates) == 1)
        taken = threads.submit(scene.instance.wait_to_take)
        assert not taken.done()
        scene.finish()
        last.result(10)
        assert taken.result(10) in (1, 2)


def test_a_batch_of_unknown_duration_is_not_waited_for(scene: Played) -> None:
    scene.runs_until_finish = True
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(scene.call, x(1))
        wait_for(lambda: len(scene.gates) == 1)
        assert at_once(scene.instance.wait_to_take)
        scene.finish()
        first.result(10)


def test_durations_are_learned_per_row(scene: Played) -> None:
    calls = self_of(scene.instance.wait_to_take)
    scene.call(x(1, 3))
    scene.call(x(1, 4))
    scene.call(x(1, 5))
    assert set(calls._row_s) == {2, 3}
    assert all(0 < each < 5 for each in calls._row_s.values())
    assert 0 < calls._start_s < 5


@pytest.mark.parametrize("parameters", [{"overlap": False}, {"disable_optimized_execution": True}])
def test_settings_can_turn_off_overlap(monkeypatch: pytest.MonkeyPatch, parameters: Any) -> None:
    scene = Played(monkeypatch, **parameters)
    assert scene.instance.concurrency == 1
    np.testing.assert_array_equal(scene.call(x(1)), x(2))


def test_a_call_waits_while_a_graph_is_captured(scene: Played) -> None:
    scene.call(x(1))
    with ThreadPoolExecutor(1) as threads:
        with not_capturing():
            waiting = threads.submit(scene.call, x(2))
            threading.Event().wait(0.05)
            assert not waiting.done()
        np.testing.assert_array_equal(waiting.result(10), x(4))


def test_many_calls_from_two_threads_get_their_own_rows(scene: Played) -> None:
    def ask(number: int) -> None:
        scene.instance.wait_to_take()
        rows: Any = StackedTensors([x(number), x(number + 1, 2)])
        np.testing.assert_array_equal(scene.call(rows), rows.to_host() * 2)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ask, [number for number in range(200) if number != 13]))


def test_threads_compute_with_the_threads_of_the_instance(scene: Played) -> None:
    within = torch.get_num_threads()
    with ThreadPoolExecutor(1) as other:
        other.submit(torch.set_num_threads, within + 1).result()
        other.submit(scene.call, x(1)).result()
        assert other.submit(torch.get_num_threads).result() == within


def self_of(method: Any) -> GpuCalls:
    calls: GpuCalls = method.__self__
    return calls


def at_once(function: Callable[[], object]) -> bool:
    with ThreadPoolExecutor(1) as thread:
        future: Future[object] = thread.submit(function)
        future.result(5)
    return True


def wait_for(is_true: Callable[[], bool]) -> None:
    event, until = threading.Event(), monotonic() + 10
    while not is_true():
        assert monotonic() < until
        event.wait(0.001)
