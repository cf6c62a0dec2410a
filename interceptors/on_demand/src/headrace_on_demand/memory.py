"""The memory of a loaded model: that of its processes, and the growth of the server's process by its load."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace import ServedModel


@dataclass(slots=True, eq=False)
class Growth:
    """The bytes by which the server has grown for one load. Loads that overlap share them in proportion to
    ``weight``."""

    weight: int
    bytes: int = 0


class LoadMeter:
    """Measures the growth of the server's process while models load. One thread.

    The growth is that of the resident memory. Memory that an eviction frees meanwhile makes it smaller.
    """

    def __init__(self) -> None:
        self._loading: list[Growth] = []
        self._last = 0

    @contextmanager
    def measured(self, weight: int) -> Iterator[Growth]:
        """Measure the load of a model with ``weight`` bytes of files, until the context ends."""
        growth = Growth(max(weight, 1))
        self._share()
        self._loading.append(growth)
        try:
            yield growth
        finally:
            self._share()
            self._loading.remove(growth)

    def _share(self) -> None:
        now = resident_bytes()
        gained, self._last = max(0, now - self._last), now
        total = sum(each.weight for each in self._loading)
        for each in self._loading:
            each.bytes += gained * each.weight // total


def resident_bytes() -> int:
    """Return the resident memory of this process; 0 without Linux's ``/proc``."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def measure(served: ServedModel, server_bytes: int) -> int:
    """Return the memory of ``served`` in bytes, and store it there. Blocks for some ms. Any thread.

    Instances in processes are measured; those in the server count for ``server_bytes``, all together.
    """
    apart = [getattr(each, "memory_bytes", int)() for each in served.executors if each.runs_on == "process"]
    served.memory_bytes = sum(apart) + (server_bytes if len(apart) < len(served.executors) else 0)
    return served.memory_bytes
