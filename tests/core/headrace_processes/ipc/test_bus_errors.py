"""A bus error in a guarded mapping is survived; any other ends the process, as without the handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="client shared memory needs Linux")

PROGRAM = """
import mmap, os, signal, sys
from headrace_processes.ipc.shared_mapping import SharedMapping
file = os.memfd_create("client")
os.ftruncate(file, 8192)
mapping, mine = SharedMapping(file, 0, 8192), mmap.mmap(file, 4096)
os.ftruncate(file, 0)
assert bytes(mapping.memory) == bytes(8192) and mapping.is_lost
print("alive", flush=True)
if sys.argv[1] == "kill":
    os.kill(os.getpid(), signal.SIGBUS)
mine[0]
print("never")
"""


@pytest.mark.parametrize("how", ["kill", "fault"])
def test_only_a_fault_in_a_guarded_mapping_is_survived(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "alive\n"), done.stderr
