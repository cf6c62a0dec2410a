"""The report of a fatal error keeps what the model's author can use; and how long the restart of a process waits.

The reports are CPython's.
"""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_processes.supervision import exits
from headrace_processes.supervision.exits import LAST_READ_S, ExitWatcher, RestartPolicy, crash_report

HOST = """
import ctypes, faulthandler, sys, threading, traceback
from importlib import import_module

def serve(folder):
    sys.path.insert(0, folder)
    faulthandler.enable()
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    threading.Thread(target=listen, daemon=True).start()
    try:
        import_module("model").execute()
    except SystemExit:
        traceback.print_exc()

def listen():
    sys.stdin.read()
"""


@pytest.fixture
def ours(tmp_path: Path) -> str:
    """Return a folder that stands for the server's own packages."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "host.py").write_text(HOST)
    return str(tmp_path / "ours")


def report(ours: str, model: str) -> str:
    """Return the crash report of a process in which ``model`` crashes."""
    theirs = Path(ours).parent / "theirs"
    theirs.mkdir()
    (theirs / "model.py").write_text(model)
    command = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {ours!r}); import host; host.serve({str(theirs)!r})",
    ]
    run = subprocess.run(command, stdin=subprocess.PIPE, capture_output=True, text=True, timeout=60)
    assert ours in run.stderr
    return run.stderr


def test_a_segmentation_fault_is_reported_with_the_models_frames(ours: str) -> None:
    words = crash_report(report(ours, "import ctypes\n\ndef execute():\n    ctypes.string_at(0)\n"), [ours])
    assert words.startswith("Fatal Python error: Segmentation fault\n\n")
    assert "Current thread (most recent call first):\n" in words
    assert 'theirs/model.py", line 4 in execute' in words
    assert "0x" not in words
    assert ours not in words
    assert "_bootstrap" not in words
    assert "Extension modules" not in words


def test_additions_of_python_3_14_are_removed() -> None:
    """The text is Python 3.14's own. The interpreter of a model may be newer than the server's."""
    words = crash_report(
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f2ab1c1a740 [python (1)] (most recent call first):\n"
        '  File "/models/m/1/model.py", line 4 in execute\n\n'
        "Current thread's C stack trace (most recent call first):\n"
        '  Binary file "/usr/bin/python3.14", at _Py_DumpStack+0x4a [0x49b2f9]\n'
        "  <truncated rest of calls>\n\nExtension modules: numpy._core (total: 1)\n",
        ["/usr/lib/headrace"],
    )
    assert words == (
        "Fatal Python error: Segmentation fault\n\n"
        'Current thread (most recent call first):\n  File "/models/m/1/model.py", line 4 in execute'
    )


def test_a_traceback_keeps_the_models_source_and_loses_ours(ours: str) -> None:
    words = crash_report(report(ours, "import sys\n\ndef execute():\n    sys.exit(3)\n"), [ours])
    assert words.startswith("Traceback (most recent call last):\n")
    assert "in execute\n    sys.exit(3)\n" in words
    assert words.endswith("SystemExit: 3")
    assert ours not in words
    assert "import_module" not in words


def test_other_words_stay_as_they_are() -> None:
    assert crash_report("out of luck\n", ["/srv"]) == "out of luck"
    assert crash_report("", ["/srv"]) == ""


def test_messages_sent_before_the_exit_are_still_received() -> None:
    """The exit is reported a moment after it is detected, or as soon as the channel has been read to the end."""
    launched: Any = SimpleNamespace(wait=lambda: 3, crash_file=io.BytesIO(b"out of luck"), folders=())

    async def ends(is_read: bool) -> float:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[tuple[int, str]] = loop.create_future()
        watcher = ExitWatcher(launched, lambda code, report: ended.set_result((code, report)), lambda: None)
        began = loop.time()
        if is_read:
            watcher._has_hung_up = True
        watcher._exited(3, "out of luck")
        assert ended.done() is is_read
        assert await ended == (3, "out of luck")
        return loop.time() - began

    assert asyncio.run(ends(False)) >= LAST_READ_S * 0.9
    assert asyncio.run(ends(True)) < LAST_READ_S


class Clock:
    """The clock of a policy; the test advances it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(exits, "monotonic", lambda: self.now)

    def exit_after(self, policy: RestartPolicy, seconds: float) -> float:
        """Return the delay after an exit that follows the last one after ``seconds``."""
        self.now += seconds
        policy.add_exit()
        return policy.delay_s


def test_each_exit_within_a_minute_doubles_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, policy = Clock(monkeypatch), RestartPolicy()
    assert [clock.exit_after(policy, 1) for _ in range(4)] == [0.0, 0.5, 1.0, 2.0]
    assert clock.exit_after(policy, 59.5) == 0.5  # of the four only the last was less than a minute ago
    assert clock.exit_after(policy, 61) == 0.0


def test_the_fifth_exit_within_a_minute_is_one_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, policy = Clock(monkeypatch), RestartPolicy()
    for _ in range(4):
        clock.exit_after(policy, 14)
        assert not policy.is_exhausted
    clock.exit_after(policy, 14)
    assert policy.is_exhausted
    slow = RestartPolicy()
    for _ in range(9):
        clock.exit_after(slow, 15)
        assert not slow.is_exhausted


def test_pauses_double_to_four_minutes_and_are_short_again_after_ten_quiet_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, policy, pauses = Clock(monkeypatch), RestartPolicy(), []
    for _ in range(6):
        while not policy.is_exhausted:
            clock.exit_after(policy, 2)
        pauses.append(policy.next_pause_s())
        clock.now += pauses[-1]
    assert pauses == [15, 30, 60, 120, 240, 240]
    clock.now += 590
    assert policy.next_pause_s() == 240
    clock.now += 240 + 601
    assert policy.next_pause_s() == 15


def test_longer_first_pauses_take_longer_to_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, policy, pauses = Clock(monkeypatch), RestartPolicy(60), []
    for _ in range(6):
        pauses.append(policy.next_pause_s())
        clock.now += pauses[-1]
    assert pauses == [60, 120, 240, 480, 960, 960]
    clock.now += 2399
    assert policy.next_pause_s() == 960
    clock.now += 960 + 2401
    assert policy.next_pause_s() == 60
