"""Measures the CPU time and the memory of process trees, and the load of the machine."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Reading:
    """Return CPU seconds so far: used by a process tree, used by the machine, and available."""

    tree_s: float
    busy_s: float
    total_s: float


def tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def read(pid: int) -> Reading:
    cpu = 0.0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu += sum(process.cpu_times()[:4])  # user and system time, also of reaped children
    times = psutil.cpu_times()
    total = sum(times[:8])  # guest time, which follows, is in user time already
    return Reading(cpu, total - times.idle - times.iowait, total)


def rss_mib(pid: int) -> float:
    """Return the resident memory of the tree in MiB."""
    total = 0
    for process in tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 2**20


def free_ports(count: int) -> list[int]:
    """Return TCP ports of the loopback that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
