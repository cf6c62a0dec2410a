"""The memory of loaded models: of their processes, and of their shares in the server's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from headrace import ServedModel

#: The least weight of a model: 1 MiB, also if the size of its files is unknown.
_LEAST_WEIGHT = 1 << 20


class ServerMemory:
    """Divides the growth of the server's process among the models that run in it, in proportion to their files.

    The sum is the memory of all models, including their executions. ``base`` is the memory of the server without
    models.
    """

    base = 0

    def begin(self) -> None:
        """Set ``base`` to the current memory. Reads a file."""
        self.base = resident_bytes()

    def shares(self, file_bytes: Mapping[str, int]) -> dict[str, int]:
        """Return the share of each loaded model, at least the size of its files in ``file_bytes``."""
        now = resident_bytes()
        if not file_bytes:
            self.base = now
        grown = max(0, now - self.base)
        weights = {name: max(size, _LEAST_WEIGHT) for name, size in file_bytes.items()}
        total = sum(weights.values())
        return {name: max(file_bytes[name], grown * weight // total) for name, weight in weights.items()}


def resident_bytes() -> int:
    """Return the resident memory of this process without pages of files; 0 without Linux's ``/proc``.

    Pages of files are engine libraries, which are never unloaded, and mapped model files, which count by their size.
    """
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def process_bytes(served: ServedModel) -> int:
    """Return the memory of the processes of ``served``, in bytes. Blocks for some ms. Any thread."""
    return sum(getattr(each, "memory_bytes", int)() for each in served.executors if each.runs_on == "process")
