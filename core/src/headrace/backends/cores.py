"""The number of cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Return the number of cores that this process may use: by CPU affinity, and by the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
