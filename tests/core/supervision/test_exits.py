"""What is left of a fatal error's report is what the model's author can use. The reports are CPython's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.supervision.exits import crash_report

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
    """A folder that stands for the server's own packages."""
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "host.py").write_text(HOST)
    return str(tmp_path / "ours")


def report(ours: str, model: str) -> str:
    """What a process says that dies of ``model``."""
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


def test_a_segmentation_fault_is_told_by_the_models_frames(ours: str) -> None:
    words = crash_report(report(ours, "import ctypes\n\ndef execute():\n    ctypes.string_at(0)\n"), [ours])
    assert words.startswith("Fatal Python error: Segmentation fault\n\n")
    assert "Current thread (most recent call first):\n" in words
    assert 'theirs/model.py", line 4 in execute' in words
    assert "0x" not in words
    assert ours not in words
    assert "_bootstrap" not in words
    assert "Extension modules" not in words


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
