"""The number of cores that this process may use."""

from __future__ import annotations

import os


def available_cores() -> int:
    """Return the number of cores that this process may use: by CPU affinity, and by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max", "rb", buffering=0) as limit:  # noqa: PTH123 (read for every load)
            quota, period = limit.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == b"max" else max(1, min(cores, int(quota) // int(period)))
