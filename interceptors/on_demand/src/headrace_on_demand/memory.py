"""The memory of loaded models: that of their processes, and their shares in the growth of the server's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from headrace import ServedModel

#: A model whose files are smaller, or of unknown size, shares as if it had 1 MiB.
_LEAST_WEIGHT = 1 << 20


class ServerMemory:
    """Divides what the server's process has grown by among the models that run in it, in proportion to their files.

    So the sum is what the models together occupy, with what their executions need. ``base`` is what the server occupies
    without models.
    """

    base = 0

    def begin(self) -> None:
        """Take what the server occupies now as its memory without models. Reads a file."""
        self.base = resident_bytes()

    def shares(self, file_bytes: Mapping[str, int]) -> dict[str, int]:
        """Return the share of each loaded model, at least its files, whose size is in ``file_bytes``."""
        now = resident_bytes()
        if not file_bytes:
            self.base = now
        grown = max(0, now - self.base)
        weights = {name: max(size, _LEAST_WEIGHT) for name, size in file_bytes.items()}
        total = sum(weights.values())
        return {name: max(file_bytes[name], grown * weight // total) for name, weight in weights.items()}


def resident_bytes() -> int:
    """Return the resident memory of this process without pages of files; 0 without Linux's ``/proc``.

    Pages of files are the libraries of engines, which stay, and files that a model maps, which count by their size.
    """
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
        return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def process_bytes(served: ServedModel) -> int:
    """Return the memory of the processes of ``served``, in bytes. Blocks for some ms. Any thread."""
    return sum(getattr(each, "memory_bytes", int)() for each in served.executors if each.runs_on == "process")
