"""The measured memory of loaded models."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

from headrace import Executor, ServedModel

#: The time of one `ProcessMemory.measure`, in seconds.
_MEASURE_S = 0.01


class MemoryOnDevice(NamedTuple):
    """The memory of one model version on ``device``: ``host``, or ``GPU 0``.

    ``bytes`` is None if nothing measures it. If it ``is_estimate``, it is the share that the control mode charges.
    """

    device: str
    bytes: int | None = None
    is_estimate: bool = False


class ProcessMemory:
    """The memory of the processes of models, as measured last. `measure` is called by one thread at a time.

    It does nothing for ``pause_s`` after it has measured: with 10 ms in 2 s, that is 0.5 % of a core.
    """

    def __init__(self, pause_s: float = 2.0) -> None:
        #: The time of the measurement, in monotonic seconds, and the bytes of each executor.
        self._measured: WeakKeyDictionary[Executor, tuple[float, int]] = WeakKeyDictionary()
        self._pause_s, self._ended_s = pause_s, -pause_s

    def measure(self, models: Sequence[ServedModel]) -> None:
        """Measure processes of ``models`` for 10 ms: new ones first, then those with the oldest measurement.

        So the cost depends neither on the number of processes nor on the number of readers.
        """
        began_s = time.monotonic()
        if began_s - self._ended_s < self._pause_s:
            return
        executors = [each for model in models for each in _processes(model)]
        for executor in sorted(executors, key=lambda each: self._measured.get(each, (0.0, 0))[0]):
            self._measured[executor] = time.monotonic(), getattr(executor, "memory_bytes", int)()
            if time.monotonic() - began_s > _MEASURE_S:
                break
        self._ended_s = time.monotonic()

    def of(self, model: ServedModel) -> list[MemoryOnDevice]:
        """Return the memory of ``model`` on each device, the host first; nothing if it has no instances. Any thread."""
        executors = model.executors
        if not executors:
            return []
        gpus = sorted({gpu for group in model.config.instance_group for gpu in group.gpus})
        return [self._on_host(model, executors), *(MemoryOnDevice(f"GPU {gpu}") for gpu in gpus)]

    def _on_host(self, model: ServedModel, executors: Sequence[Executor]) -> MemoryOnDevice:
        processes = _processes(model)
        is_apart = len(processes) == len(executors)
        if model.memory_bytes:
            return MemoryOnDevice("host", model.memory_bytes, not is_apart)
        sizes = [self._measured.get(each, (0.0, 0))[1] for each in processes]
        return MemoryOnDevice("host", sum(sizes) if is_apart and all(sizes) else None)


def _processes(model: ServedModel) -> list[Executor]:
    return [each for each in model.executors if each.runs_on == "process"]


def server_bytes() -> int | None:
    """Return the resident memory of this process in bytes; None without Linux's ``/proc``."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
