"""Overlapping calls of one instance on a GPU: while one computes, another copies, starts its kernels, or waits.

PyTorch starts each operator from Python, and other threads need the interpreter, too. With one call at a time, the GPU
would be idle from the end of a batch until the first kernels of the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from time import monotonic, thread_time
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import StackedTensors
from headrace_engines import set_torch_threads
from headrace_torch.pinned_memory import PinnedArrays
from headrace_torch.torch_process import not_capturing
from headrace_torch.torch_tensors import TorchTensor, as_tensor, mark_complete

#: Calls at once: one computes, and the next one copies its inputs and starts its kernels.
AT_ONCE = 2
#: Inputs of fewer bytes are copied from ordinary memory: a pinned buffer would cost more than it saves.
PINNED_FROM = 1 << 18
#: Batches begin to overlap (False) above, and stop (True) below this ratio: the time that the GPU computes after all
#: kernels are started, to the time that starting them takes. Below, the interpreter is the limit, and two threads that
#: start kernels are slower than one.
_WORTH = {False: 0.3, True: 0.12}
#: The weight of a new measurement in an average.
_NEW = 0.25
#: From the end of `GpuCalls.wait_to_take` to the begin of the call, in seconds.
_TAKE_S = 0.0005


class Computation:
    """The work of one call on the GPU: its ``rows``, and in monotonic seconds, when its first kernel (``began_s``) and
    its last kernel (``started_s``) were started, and its expected end, 0 if unknown. ``ended`` is set when a thread has
    waited for its end."""

    __slots__ = ("began_s", "calls", "ended", "expected_s", "rows", "started_s")

    def __init__(self, calls: GpuCalls, rows: int, began_s: float, expected_s: float) -> None:
        self.calls, self.rows, self.began_s, self.expected_s = calls, rows, began_s, expected_s
        self.started_s = began_s
        self.ended = threading.Event()


class _Thread(threading.local):
    """The state of one thread: the CUDA stream of its ``copies``, the ``sources`` that are being copied to the GPU, the
    event ``copied`` at their end, and the time ``began_s`` of its call."""

    copies: Any = None
    copied: Any = None
    began_s = 0.0

    def __init__(self) -> None:
        self.sources: list[npt.NDArray[Any]] = []


class GpuCalls:
    """The calls of one instance, which computes on ``stream``, one call after the other.

    Each calling thread has a stream for its copies. ``batches``: tensors have rows. ``spins``: threads that wait poll
    the GPU, which costs a core and saves some microseconds; else they sleep.
    """

    def __init__(self, torch: Any, stream: Any, pool: PinnedArrays, spins: bool, batches: bool) -> None:
        self._torch, self._stream, self._pool, self._spins, self._batches = torch, stream, pool, spins, batches
        self._thread = _Thread()
        self._threads_within = torch.get_num_threads()
        #: Held while a call starts its kernels.
        self._starting = threading.Lock()
        self._last: Computation | None = None
        self._last_end_s = 0.0
        #: The average time from the begin of a call until its kernels are started, and the CPU time of that.
        self._start_s = self._launch_s = 0.0
        #: The average time that the GPU computes after all kernels of a batch are started, and if batches overlap.
        self._rest_s, self._overlaps = 0.0, False
        #: The average time per row of computations with 2^(n-1) + 1 to 2^n rows, by n.
        self._row_s: dict[int, float] = {}

    # ------------------------------------------------------------------ on the thread of a call, in this order

    def wait_to_take(self) -> int:
        """Wait for the current batch, and return the number of calls among which to divide the requests in flight.

        If batches overlap, the wait ends so long before the batch that the next one can start its kernels in time.
        """
        with self._starting:
            last = self._last
        if last is not None and last.expected_s and not last.ended.is_set():
            left_s = last.expected_s - monotonic()
            left_s = left_s - 1.25 * self._start_s - _TAKE_S if self._overlaps else 2 * left_s + _TAKE_S
            if left_s > 0:
                last.ended.wait(left_s)
        return AT_ONCE if self._overlaps else 1

    def begin(self) -> AbstractContextManager[None]:
        """Begin a call."""
        thread, capturing = self._thread, not_capturing()
        if thread.copies is None:
            self._prepare(thread)
        if capturing.locked():
            with capturing:  # some ms: work of this call could end the capture
                pass
        thread.began_s = monotonic()
        if thread.sources:
            thread.copied.synchronize()  # of the last call: usually long ago
            thread.sources.clear()
        return nullcontext()

    def _prepare(self, thread: _Thread) -> None:
        thread.copies = self._torch.cuda.Stream(self._stream.device)
        if self._torch.get_num_threads() != self._threads_within:
            set_torch_threads(self._torch, self._threads_within)

    def to_device(self, array: npt.NDArray[Any] | StackedTensors) -> Any:
        """Return a copy on the GPU of an input, whose parts are arrays. `computing` and `order` wait for it."""
        torch, thread, stream = self._torch, self._thread, self._stream
        if isinstance(array, np.ndarray):
            source, waits = array, True
        elif prod(array.shape) * array.dtype.itemsize < PINNED_FROM:
            source, waits = array.to_host(), True
        else:
            source, waits = array.to_host(self._pool.array(array.shape, array.dtype)), False
            thread.sources.append(source)
        with torch.cuda.stream(thread.copies):
            copy = as_tensor(torch, source).to(stream.device, non_blocking=not waits)
            thread.copied = thread.copies.record_event()
        copy.record_stream(stream)
        return copy

    def order(self, copy: Any) -> Any:
        """Make all later work wait for ``copy``, the last result of `to_device`. Return ``copy``."""
        self._stream.wait_event(self._thread.copied)
        return copy

    def computing(self, run: Callable[..., Any], results: Callable[[Any], Any]) -> Callable[..., Any]:
        """Return a function that starts the kernels of ``run`` and returns its ``results`` with their events."""

        def start(*arguments: Any, **named: Any) -> Any:
            thread = self._thread
            with self._starting:
                if thread.copied is not None:
                    self._stream.wait_event(thread.copied)
                rows = _rows_of(arguments or tuple(named.values())) if self._batches else 1
                computation, begin_s = self._expect(rows), thread_time()
                found = results(run(*arguments, **named))
                self._launch_s = _average(self._launch_s, thread_time() - begin_s)
                computation.started_s = monotonic()
                self._mark(found.values(), computation)
                self._last = computation
                self._start_s = _average(self._start_s, computation.started_s - thread.began_s)
            return found

        return start

    def _expect(self, rows: int) -> Computation:
        now_s, last, row_s = monotonic(), self._last, self._row_s.get((rows - 1).bit_length(), 0.0)
        free_s = now_s if last is None or last.ended.is_set() else max(now_s, last.expected_s)
        return Computation(self, rows, now_s, free_s + rows * row_s if row_s else 0.0)

    def _mark(self, tensors: Iterable[Any], computation: Computation) -> None:
        stream = self._stream
        complete = stream.record_event()
        results = [each for each in tensors if isinstance(each, TorchTensor)]
        for each in results:
            each.stream, each.complete, each.computation = stream, complete, computation
        mark_complete(self._torch, [each for each in results if each.tensor.device != stream.device])

    def to_host(self, tensor: Any, dtype: np.dtype[Any], complete: Any, computation: Computation) -> npt.NDArray[Any]:
        """Return a copy of ``tensor``, a result of ``computation``, in pinned memory. Blocks until it is complete."""
        torch, thread = self._torch, self._thread
        if thread.copies is None:
            self._prepare(thread)
        host = self._pool.array(tensor.shape, dtype)
        copied = torch.cuda.Event(blocking=not self._spins)
        thread.copies.wait_event(complete)
        with torch.inference_mode(), torch.cuda.stream(thread.copies):
            as_tensor(torch, host).copy_(tensor, non_blocking=True)
            copied.record(thread.copies)
        copied.synchronize()
        if thread.sources and thread.copied.query():
            thread.sources.clear()
        if not computation.ended.is_set():
            self._end(computation)
        return host

    def _end(self, computation: Computation) -> None:
        now_s, last_end_s = monotonic(), self._last_end_s
        took_s = now_s - max(computation.began_s, last_end_s)
        self._last_end_s = now_s
        size, row_s = (computation.rows - 1).bit_length(), took_s / computation.rows
        known_s = self._row_s.get(size, row_s)
        # The measurement is too large if the GPU was idle before. So the average falls fast and rises slowly.
        self._row_s[size] = known_s + (0.5 if row_s < known_s else 0.05) * (row_s - known_s)
        rest_s = now_s - max(computation.started_s, last_end_s)
        self._rest_s += _NEW * (rest_s - self._rest_s)
        self._overlaps = self._rest_s > self._launch_s * _WORTH[self._overlaps]
        computation.ended.set()


def _average(known_s: float, new_s: float) -> float:
    """Return the average with ``new_s``, limited since the first calls may take seconds, to choose kernels."""
    return known_s + _NEW * (min(new_s, 2 * known_s + _TAKE_S) - known_s)


def _rows_of(arguments: Sequence[Any]) -> int:
    tensors = arguments[0].values() if isinstance(arguments[0], dict) else arguments
    return max([each.shape[0] for each in tensors if getattr(each, "shape", ())], default=1) or 1
