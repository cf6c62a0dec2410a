"""The C library returns memory when it is called to; in a process of its own, whose memory nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest

THREAD = """
import gc, re, threading
from pathlib import Path
from headrace.memory_release import release_memory

def resident_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

def work():
    del [bytes(24 << 20)][:]  # from here on blocks below this lie in the thread's own heap
    before = resident_mib()
    block = b"x" * (20 << 20)
    lives_on = bytearray({above})
    del block
    kept = resident_mib() - before
    release_memory()
    print(kept, resident_mib() - before)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the heaps are glibc's")
@pytest.mark.parametrize("above", [0, 600], ids=["at its end", "below what lives on"])
def test_the_heap_of_a_thread_shrinks_to_what_it_was(above: int) -> None:
    code = THREAD.replace("{above}", str(above))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept_mib, left_mib = map(int, ran.stdout.split())
    assert kept_mib >= 19  # else the C library needs no telling
    assert left_mib <= 2


SHARED = """
import re, threading
from pathlib import Path
from headrace.memory_release import share_heap, release_memory

def resident_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

release_memory()  # as a server does when it has started
{share}
before, worked, idle = resident_mib(), threading.Event(), threading.Event()
pieces = []

def work():
    pieces.extend([b"x" * size for size in range(4000, 9000)])
    pieces.clear()
    worked.set()
    idle.wait()

thread = threading.Thread(target=work)
thread.start()
worked.wait()
kept = resident_mib() - before
release_memory()
print(kept, resident_mib() - before)
idle.set()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the heaps are glibc's")
@pytest.mark.parametrize(("share", "is_left"), [("", True), ("share_heap()", False)], ids=["apart", "shared"])
def test_memory_freed_by_an_idle_thread_is_returned_only_from_a_shared_heap(share: str, is_left: bool) -> None:
    code = SHARED.replace("{share}", share)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kept_mib, left_mib = map(int, ran.stdout.split())
    assert kept_mib >= 15
    assert (left_mib > 10) is is_left


LEFT = """
import os, re, threading
from pathlib import Path
from headrace.memory_release import release_left_heaps, release_memory

def resident_mib():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10

release_memory()  # as a server does when it has started
before, pieces, made = resident_mib(), [], threading.Barrier(4)

def work():
    made.wait()  # each has a heap of its own
    pieces.extend([b"x" * (4 << 20) for _ in range(4)])
    made.wait()

threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
while len(os.listdir("/proc/self/task")) > 1: os.sched_yield()  # a joined thread may still have its heap
pieces.clear()  # on another thread than the one that has made them, as by a garbage collection
release_memory()
kept = resident_mib() - before
release_left_heaps()
print(kept, resident_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the heaps are glibc's")
def test_heaps_of_threads_that_have_ended_are_returned() -> None:
    ran = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=True)
    kept_mib, left_mib = map(int, ran.stdout.split())
    assert kept_mib >= 32  # else the C library needs no telling
    assert left_mib <= 4
