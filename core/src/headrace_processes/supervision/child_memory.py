"""The memory of a child process."""

from __future__ import annotations

import os
from pathlib import Path

_KIB = 1024


def memory_of(pid: int) -> int:
    """Return the memory of the process ``pid`` in bytes; 0 if it has ended, or without Linux's ``/proc``. Blocks.

    A page that n processes share counts 1/n for each, so the sum over all processes is exact. Exception: shared memory
    counts whole for the child. Only the child and the server map it, and the server maps it for the child.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        sizes_kib = {key: int(value.split()[0]) for key, _, value in (line.partition(":") for line in lines)}
        return (sizes_kib["Pss"] + sizes_kib.get("Pss_Shmem", 0)) * _KIB
    except (OSError, KeyError, ValueError):
        pass
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
