"""The memory of a process, beside what psutil finds."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys

import psutil
import pytest

from headrace_processes.supervision.child_memory import memory_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
_MIB = 1 << 20
#: Allocates this many MiB, prints a line, and waits.
_CHILD = "import sys; kept = bytearray(b'x') * (int(sys.argv[1]) << 20); print('ready', flush=True); sys.stdin.read()"


def test_memory_is_that_of_the_process_and_of_no_other() -> None:
    words = [sys.executable, "-S", "-c", _CHILD]
    with (
        subprocess.Popen([*words, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as small,
        subprocess.Popen([*words, "65"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as large,
    ):
        for child in (small, large):
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        assert abs(memory_of(large.pid) - memory_of(small.pid) - 64 * _MIB) < _MIB
        assert abs(memory_of(large.pid) - psutil.Process(large.pid).memory_full_info().pss) < _MIB
        small.kill()
        large.kill()
    assert memory_of(large.pid) == 0


def test_shared_memory_of_two_processes_counts_whole() -> None:
    with mmap.mmap(-1, 32 * _MIB) as shared:
        shared.write(b"x" * (32 * _MIB))
        code = f"m = memoryview(shared); total = sum(m[::{mmap.PAGESIZE}])"
        child = os.fork()
        if child == 0:
            exec(code)  # touches every page
            os.kill(os.getpid(), 19)  # stops until it is killed
        os.waitpid(child, os.WUNTRACED)
        try:
            alone = psutil.Process(child).memory_full_info().pss
            assert abs(memory_of(child) - alone - 16 * _MIB) < _MIB
        finally:
            os.kill(child, 9)
            os.waitpid(child, 0)
