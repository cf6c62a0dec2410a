"""If a process dies, its requests are answered, and another process is started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.errors import Code, HeadraceError, Unavailable
from headrace.messages.response import InferResponse
from headrace_processes.supervision import exits

if TYPE_CHECKING:
    from tests.core.headrace_processes.conftest import Running

    Run = Callable[..., Running]
    WaitUntil = Callable[..., None]

#: The specification is a second; the machine may be busy.
SOON_S = 5.0
#: No client sees any of these: numbers of processes and descriptors, addresses, files of the server.
INTERNALS = re.compile(r"\b(pid|fd|memfd|/proc|/dev/shm|site-packages)\b|0x[0-9a-f]+|headrace/executors")


def exists(pid: int) -> bool:
    """Return True if the process ``pid`` runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def refusal(model: Running, deed: str) -> HeadraceError:
    """The error that ``deed`` is answered with, soon."""
    begun = monotonic()
    with pytest.raises(HeadraceError) as caught:
        model.infer(deed)
    assert monotonic() - begun < SOON_S
    assert not INTERNALS.search(caught.value.message), caught.value.message
    return caught.value


def wait_for_restart(model: Running, wait_until: WaitUntil, count: int = 1) -> None:
    wait_until(lambda: model.executor.alive and model.executor.restarts == count, "the instance is back", 60)
    assert np.array_equal(np.asarray(model.infer().outputs["y"]), [[2, 3]])
    assert model.executor.reason == "" or model.executor.alive


@pytest.mark.parametrize(
    ("deed", "how", "trace"),
    [
        ("kill", "was killed by SIGKILL", ""),
        ("segfault", "was killed by SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("exit", "exited with status 3", ""),
        ("hang up", "closed its channel and was killed", ""),
        ("lie", "sent a malformed message and was killed", ""),
        ("babble", "sent a malformed message and was killed", ""),
    ],
)
def test_requests_of_a_dead_process_are_answered_and_another_one_starts(
    run_trial: Run, wait_until: WaitUntil, deed: str, how: str, trace: str
) -> None:
    model = run_trial()
    first = model.number("pid")
    error = refusal(model, deed)
    assert error.code is Code.UNAVAILABLE
    assert error.message == f"Stub process 'm_0_0' is not healthy. Model instance 'm_0_0' {how}"
    assert model.executor.reason.startswith(f"model instance 'm_0_0' {how}")
    assert trace in model.executor.reason
    assert not INTERNALS.search(model.executor.reason)
    wait_for_restart(model, wait_until)
    assert model.number("pid") != first
    assert not exists(first)
    assert model.server.served("m")[0].snapshot().restarts == 1


def test_a_process_that_closes_the_side_line_is_replaced(run_trial: Run, wait_until: WaitUntil) -> None:
    model = run_trial()
    with contextlib.suppress(HeadraceError):  # it may have exited before it has answered
        model.infer("hang up aside")
    wait_until(lambda: model.executor.restarts == 1, "it has been replaced")
    wait_for_restart(model, wait_until)


def test_the_model_is_not_ready_while_its_process_is_replaced(
    run_trial: Run, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exits, "_FIRST_DELAY_S", 3600.0)
    monkeypatch.setattr(exits, "_LONGEST_DELAY_S", 3600.0)
    model = run_trial()
    refusal(model, "exit")
    wait_for_restart(model, wait_until)
    refusal(model, "segfault")
    assert not model.executor.alive
    assert not model.server.ready
    assert "Segmentation fault" in model.reason
    begun = monotonic()
    model.stop()  # which does not wait for the restart either
    assert monotonic() - begun < 60


def test_requests_that_wait_are_served_by_the_next_process(run_trial: Run, wait_until: WaitUntil) -> None:
    model = run_trial()
    with ThreadPoolExecutor(8) as pool:
        doomed = pool.submit(model.infer, "gate")
        wait_until((model.folder / "running").exists, "it runs")
        waiting = [pool.submit(model.infer) for _ in range(6)]
        wait_until(lambda: model.server.served("m")[0].model_queue.pending == 6, "the others wait")
        os.kill(pid_of(model), signal.SIGKILL)
        with pytest.raises(HeadraceError, match="SIGKILL"):
            doomed.result(SOON_S)
        assert all(isinstance(each.result(15), InferResponse) for each in waiting)


def pid_of(model: Running) -> int:
    """The child of a model whose instance is busy."""
    return int(model.executor._child._launched.process.pid)  # type: ignore[attr-defined]


def test_a_crash_does_not_touch_the_other_instance(run_trial: Run, wait_until: WaitUntil) -> None:
    model = run_trial(instances=2)
    with ThreadPoolExecutor(2) as pool:
        busy = pool.submit(model.infer, "gate")
        wait_until((model.folder / "running").exists, "one runs")
        refusal(model, "exit")
        assert not busy.done()
        (model.folder / "open").touch()
        assert isinstance(busy.result(10), InferResponse)
    wait_until(lambda: all(executor.alive for executor in model.executors), "both are back")


def test_batch_that_a_dead_instance_was_forming_runs_on_another(
    run_trial: Run, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No wake-up is lost: the queue delay ends although the instance that waited for it is dead."""
    monkeypatch.setattr(exits.RestartPolicy, "delay_s", 3600.0)  # it is not restarted
    config = "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 2000000 }"
    model = run_trial(instances=2, config=config)
    forming = model.server.served("m")[0].model_queue.idle
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(model.infer)
        wait_until(lambda: bool(forming) and forming[0].wake_at > 0, "one forms a batch")
        (watcher,) = [executor for executor in model.executors if executor._source is forming[0]]  # type: ignore[attr-defined]
        os.kill(watcher._child._launched.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        assert isinstance(waiting.result(10), InferResponse)


# ---------------------------------------------------------------------- crash loops


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exits, "_FIRST_DELAY_S", 0.01)


@pytest.mark.usefixtures("hurried")
def test_an_instance_that_keeps_dying_pauses_after_the_fifth_death(
    run_trial: Run, wait_until: WaitUntil, write_model: Any
) -> None:
    model = run_trial()
    for restarts in range(5):
        assert model.executor.restarts == restarts
        refusal(model, "exit")
        if restarts < 4:
            wait_for_restart(model, wait_until, restarts + 1)
    wait_until(lambda: model.executor.reason.startswith("died 5 times within 60 s"), "it pauses")
    assert model.executor.restarts == 4
    error = refusal(model, "")
    assert error.code is Code.UNAVAILABLE
    assert error.message.startswith("Stub process 'm_0_0' is not healthy. Died 5 times")
    assert refusal(model, "").message == error.message
    assert "exited with status 3" in model.reason


@pytest.mark.usefixtures("hurried")
def test_requests_wait_for_the_instance_that_is_left(run_trial: Run, wait_until: WaitUntil) -> None:
    model = run_trial(instances=2)
    first, second = model.executors
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            wait_until(lambda: first.alive, "it is back")
            os.kill(first._child._launched.process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            wait_until(lambda: not first.alive, "it is dead")
            calls = [pool.submit(model.infer) for _ in range(4)]
            assert all(isinstance(each.result(10), InferResponse) for each in calls)
    wait_until(lambda: first.reason.startswith("died 5 times"), "one is given up")
    assert isinstance(model.infer(), InferResponse)
    assert second.alive
    assert not model.server.ready


def die_until_it_pauses(model: Running, wait_until: WaitUntil) -> None:
    for _ in range(5):
        wait_until(lambda: model.executor.alive, "it is back")
        refusal(model, "exit")
    wait_until(lambda: model.executor.reason.startswith("died 5 times"), "it pauses")


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("mode", ["none", "poll", "explicit"])
def test_a_load_ends_the_pause_of_an_instance_in_every_mode_although_no_file_changed(
    run_trial: Run, wait_until: WaitUntil, mode: str
) -> None:
    named = {"load_model": ("m",)} if mode == "explicit" else {}
    model = run_trial(options={"model_control_mode": mode, **named})

    def load(**parameters: str) -> None:
        asyncio.run_coroutine_threadsafe(model.server.load("m", parameters), model.server.loop).result(20)

    die_until_it_pauses(model, wait_until)
    if mode != "explicit":
        with pytest.raises(Unavailable, match="is not allowed"):
            load(config="{}")
    load()
    assert model.executor.restarts == 0
    assert isinstance(model.infer(), InferResponse)
    assert model.server.ready
    if mode != "explicit":
        with pytest.raises(Unavailable, match="is not allowed"):  # it is alive
            load()


@pytest.mark.usefixtures("hurried")
def test_simultaneous_loads_share_one_load_and_its_error(
    run_trial: Run, wait_until: WaitUntil, repository: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = run_trial()
    die_until_it_pauses(model, wait_until)

    async def load_often() -> list[str]:
        loads = (model.server.load("m") for _ in range(8))
        return [str(outcome) for outcome in await asyncio.gather(*loads, return_exceptions=True)]

    def load() -> Counter[str]:
        return Counter(asyncio.run_coroutine_threadsafe(load_often(), model.server.loop).result(30))

    config = repository / "m" / "config.pbtxt"
    written = config.read_text()
    config.write_text(written + "max_batch_size: -1")
    caplog.clear()
    ((error, count),) = load().items()
    assert "max_batch_size" in error
    assert count == 8
    assert caplog.text.count("failed to load 'm'") == 1
    assert model.executor.reason.startswith("died 5 times")  # it pauses as before
    config.write_text(written)
    caplog.clear()
    assert load() == {"None": 8}
    assert caplog.text.count("loading: m:1") == 1
    assert isinstance(model.infer(), InferResponse)


@pytest.mark.usefixtures("hurried")
def test_an_instance_starts_again_by_itself_after_a_pause_and_a_longer_one(
    run_trial: Run, wait_until: WaitUntil
) -> None:
    model = run_trial(config='parameters { key: "restart_pause_seconds" value { string_value: "1" } }')
    for pause_s in (1, 2):
        die_until_it_pauses(model, wait_until)
        match = re.search(
            r"it starts again at (.*), after a pause of (\d+) s, or when the model is loaded", model.executor.reason
        )
        assert match is not None, model.executor.reason
        left_s = datetime.strptime(match[1] + "+0000", "%Y-%m-%d %H:%M:%S UTC%z").timestamp() - time()
        assert int(match[2]) == pause_s
        assert pause_s - SOON_S < left_s <= pause_s
        assert "exited with status 3" in model.executor.reason
        assert refusal(model, "").code is Code.UNAVAILABLE  # at once: no request waits for the end of the pause
        wait_until(lambda: model.executor.alive, "it is back", 60)
        assert isinstance(model.infer(), InferResponse)
        assert model.server.ready


@pytest.mark.usefixtures("hurried")
def test_an_instance_that_cannot_be_started_pauses_and_restarts_when_it_can(
    run_trial: Run, wait_until: WaitUntil, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = run_trial()
    model.executor._restart_policy = exits.RestartPolicy(0.2)  # type: ignore[attr-defined]
    begin, can_start = model.executor._begin, threading.Event()  # type: ignore[attr-defined]

    async def fail() -> None:
        if not can_start.is_set():
            raise Unavailable("no memory is left")
        await begin()

    monkeypatch.setattr(model.executor, "_begin", fail)
    refusal(model, "exit")
    wait_until(lambda: "after a pause of 0.4 s" in model.executor.reason, "it pauses again")
    assert model.executor.reason.endswith("no memory is left")
    assert model.executor.reason.count("died 5 times") == 1
    can_start.set()
    wait_until(lambda: model.executor.alive, "it is back", 60)
    assert isinstance(model.infer(), InferResponse)


# ---------------------------------------------------------------------- processes that do not end


@pytest.mark.parametrize("deed", ["stop", "sleep"])
def test_a_process_that_hangs_is_killed_when_its_model_goes(run_trial: Run, wait_until: WaitUntil, deed: str) -> None:
    model = run_trial(options={"exit_timeout_secs": 2})
    pid = model.number("pid")
    answers: Future[Any] = Future()
    model.submit(lambda answer, final: answers.set_result(answer), do=deed)
    wait_until((model.folder / "running").exists, "it hangs")
    with pytest.raises(HeadraceError):  # it did not end in order
        model.stop()
    wait_until(lambda: not exists(pid), "the process has been killed", 30)


def test_a_process_that_ignores_sigterm_closes_as_any_other(run_trial: Run) -> None:
    model = run_trial()
    model.infer("ignore term")
    pid = model.number("pid")
    model.stop()
    assert not exists(pid)


@pytest.mark.parametrize("deed", ["start", "start carelessly", "fork"])
@pytest.mark.parametrize("end", ["death", "unload"])
def test_children_of_a_model_process_are_killed_with_it(
    run_trial: Run, wait_until: WaitUntil, deed: str, end: str
) -> None:
    model = run_trial()
    started = model.number(deed)
    assert exists(started)
    if deed == "start carelessly":  # it holds nothing of ours
        targets = []
        for link in Path(f"/proc/{started}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it is just starting
                targets.append(str(link.readlink()))
        assert not [target for target in targets if target.startswith(("socket:", "/memfd:"))]
    if end == "death":
        refusal(model, "kill")
        wait_for_restart(model, wait_until)
    else:
        model.stop()
    wait_until(lambda: not exists(started), "it has died, too", 30)


def test_a_process_that_holds_the_lines_from_elsewhere_delays_nothing(run_trial: Run, wait_until: WaitUntil) -> None:
    model = run_trial()
    stray = model.number("fork away")
    try:
        refusal(model, "kill")
        wait_for_restart(model, wait_until)
    finally:
        os.kill(stray, signal.SIGKILL)


@pytest.mark.parametrize("instance_kind", ["requests", "deferred"])
def test_a_fork_that_returns_from_its_batch_ends_and_disturbs_nobody(
    run_trial: Run, wait_until: WaitUntil, instance_kind: str
) -> None:
    model = run_trial(instance_kind=instance_kind)
    forked = model.number("fork back")
    assert forked
    for _ in range(20):
        assert model.number("pid") != forked
    wait_until(lambda: not exists(forked), "the fork has ended", 30)
    assert model.executor.restarts == 0


# ---------------------------------------------------------------------- loading


def test_a_load_that_never_ends_is_ended_and_says_where_it_was(run_trial: Run) -> None:
    for seconds in (3, 9):  # on a slow machine it takes a while until then
        reason = run_trial(load="sleep", load_timeout_s=seconds).reason
        assert f"model instance 'm_0_0' did not load within {seconds} s" in reason
        if "in _sleep" in reason:
            break
    else:
        pytest.fail(reason)


def test_a_late_load_whose_process_exits_on_the_traceback_signal_is_reported_as_late(run_trial: Run) -> None:
    """An interpreter that has just been started ends by that question, and its crash report is read and closed then."""
    assert "model instance 'm_0_0' did not load within 0.001 s" in run_trial(load="sleep", load_timeout_s=0.001).reason


@pytest.mark.parametrize(
    ("deed", "how"),
    [
        ("exit", "model instance 'm_0_0' exited with status 3 while it was loading"),
        ("segfault", "Fatal Python error: Segmentation fault"),
        ("leave", "SystemExit: 3"),
        ("hang up", "closed its channel and was killed"),
    ],
)
def test_a_load_that_dies_is_reported_with_its_exit(run_trial: Run, deed: str, how: str) -> None:
    reason = run_trial(load=deed).reason
    assert how in reason
    assert not INTERNALS.search(reason), reason


def test_a_name_that_no_process_can_have_is_refused(run_trial: Run) -> None:
    model = run_trial(config='instance_group { name: "a\\000b" count: 1 }')
    assert "null byte" in model.reason


# ---------------------------------------------------------------------- shared memory


def test_a_process_cannot_shrink_the_memory_it_shares(run_trial: Run) -> None:
    model = run_trial(instance_kind="requests")
    x = np.ones((1, 1 << 20), np.float32)
    assert model.infer(x=x)
    assert 2 <= model.number("shrink") < 100  # there are two, and none of them shrunk
    assert np.array_equal(np.asarray(model.infer(x=x).outputs["y"]), x + np.float32(1))


def test_a_process_that_scribbles_over_shared_memory_harms_only_itself(run_trial: Run, wait_until: WaitUntil) -> None:
    """Whatever stands there, the server answers in the shape that was announced."""
    model = run_trial()
    model.infer("scribble")
    x = np.ones((1, 1 << 18), np.float32)
    for _ in range(20):
        assert np.asarray(model.infer(x=x).outputs["y"]).shape == x.shape
    refusal(model, "kill")
    wait_for_restart(model, wait_until)


# ---------------------------------------------------------------------- nothing is left


def descriptors() -> list[str]:
    """Return the number of open descriptors of this process, by kind."""
    kinds = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            kinds.append(str(link.readlink()).partition(":[")[0])
    return sorted(kinds)


def test_exits_and_cycles_leave_no_descriptor_and_no_thread(run_trial: Run, wait_until: WaitUntil) -> None:
    shared = set(Path("/dev/shm").iterdir())  # what other programs have there
    model = run_trial()
    refusal(model, "exit")
    wait_for_restart(model, wait_until)
    wait_until(lambda: sum(thread.name.startswith("headrace-wait") for thread in threading.enumerate()) == 1, "")
    before, threads = descriptors(), threading.active_count()
    refusal(model, "exit")
    wait_for_restart(model, wait_until, 2)
    wait_until(lambda: len(descriptors()) <= len(before), f"no more descriptors than {before}", 30)
    wait_until(lambda: threading.active_count() <= threads, "no more threads", 30)
    assert set(Path("/dev/shm").iterdir()) <= shared
