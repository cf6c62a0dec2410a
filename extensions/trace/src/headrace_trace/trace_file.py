"""Triton's trace files: an array of records, written by a separate thread.

A file is written while the server runs, so that memory does not grow with the number of traces. It becomes a complete
JSON document when it is closed. Source: docs/spec/behaviours.md section 12.1.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace import Caller, rate_limited_logger
from headrace_trace.recording import RequestTrace, TracedCall
from headrace_trace.settings import Sampler
from headrace_trace.traced_tensors import CopiedTensor, text_of

log = rate_limited_logger(__name__)

#: Requests that wait for the thread; their tensors may have this many bytes. More are dropped.
MAX_WAITING = 4096
MAX_WAITING_BYTES = 64 << 20
#: Files that are open at once for settings with a log frequency.
_MAX_OPEN = 16
#: The longest time that the end of the server waits for the thread.
_CLOSE_S = 5.0


class TraceFiles:
    """The trace files of one server: ``path``, and ``path.0``, ``path.1``, ... for settings with a log frequency."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.written = self.dropped = 0
        self._waiting: queue.Queue[tuple[RequestTrace, int, bool] | None] = queue.Queue(MAX_WAITING)
        #: The bytes of queued and of written tensors.
        self._queued_bytes = self._written_bytes = 0
        self._main = _File(path)
        self._indexed: dict[Sampler, tuple[_File, int]] = {}
        self._next_index = 0
        self._thread = threading.Thread(target=self._run, name="headrace-trace", daemon=True)
        self._thread.start()

    def follows(self, traceparent: str) -> bool:
        return False

    def begin(self, call: TracedCall, caller: Caller) -> None:
        pass

    def export(self, trace: RequestTrace) -> None:
        size = sum(tensor.nbytes for call in trace.calls for _, _, tensor in call.tensors)
        if self._queued_bytes - self._written_bytes + size > MAX_WAITING_BYTES:
            self._refuse(trace)
            return
        try:
            self._waiting.put_nowait((trace, size, trace.sampler.is_exhausted))
            self._queued_bytes += size
        except queue.Full:
            self._refuse(trace)

    def close(self) -> None:
        try:
            self._waiting.put(None, timeout=_CLOSE_S)
        except queue.Full:
            return
        self._thread.join(_CLOSE_S)

    def _refuse(self, trace: RequestTrace) -> None:
        trace.free()
        self._drop("traces are dropped: the disk takes them more slowly than they are made")

    def _drop(self, text: str, *values: object) -> None:
        self.dropped += 1
        log.warning(text, *values)

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            trace, size, is_last = item
            try:
                self._write(trace, is_last)
                self.written += 1
            except OSError as error:
                self._drop("a trace is dropped: '%s': %s", self._path, error.strerror)
            except Exception:
                self.dropped += 1
                log.exception("a trace is dropped")
            finally:
                trace.free()
                self._written_bytes += size
                del item, trace
        for file, _ in self._indexed.values():
            file.close()
        self._main.close()

    def _write(self, trace: RequestTrace, is_last: bool) -> None:
        text = ",".join(json.dumps(record, separators=(",", ":")) for record in records(trace))
        sampler = trace.sampler
        every = sampler.settings.log_frequency
        if not every:
            self._main.write(text)
            if is_last:
                self._main.close(f"{self._path}.{self._next_index}")
                self._next_index += 1
            return
        file, count = self._indexed.get(sampler) or (self._open_next(), 0)
        file.write(text)
        self._indexed[sampler] = file, count + 1
        if count + 1 >= every or is_last:
            file.close()
            del self._indexed[sampler]

    def _open_next(self) -> _File:
        if len(self._indexed) >= _MAX_OPEN:  # of settings that have been changed since
            oldest = next(iter(self._indexed))
            self._indexed.pop(oldest)[0].close()
        file = _File(f"{self._path}.{self._next_index}")
        self._next_index += 1
        return file


class _File:
    """One file: an array that is written piece by piece. A failed piece is removed completely."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor = -1
        self._size = 0

    def write(self, text: str) -> None:
        """Append the records in ``text``. Raises `OSError`."""
        if self._descriptor < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            descriptor = os.open(self._path, flags | os.O_NONBLOCK, 0o644)  # does not wait for the reader of a FIFO
            os.set_blocking(descriptor, True)
            self._descriptor, self._size = descriptor, 0
        self._append((b"," if self._size else b"[") + text.encode())

    def close(self, new_path: str = "") -> None:
        """End the array, and rename the file if there is a ``new_path``. Log an error."""
        if self._descriptor < 0:
            return
        try:
            self._append(b"]" if self._size else b"[]")
            if new_path:
                Path(self._path).replace(new_path)
        except OSError as error:
            log.warning("the end of the trace file '%s' could not be written: %s", self._path, error)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        except OSError:
            with suppress(OSError):  # a pipe can not be shortened
                os.ftruncate(self._descriptor, self._size)
                os.lseek(self._descriptor, self._size, os.SEEK_SET)
            raise
        self._size += len(data)


def records(trace: RequestTrace) -> Iterator[dict[str, Any]]:
    """Yield the records of a request: of its models first, the latest first, as Triton does."""
    for call in reversed(trace.calls):
        yield from _records(call)


def _records(call: TracedCall) -> Iterator[dict[str, Any]]:
    takes_timestamps = call.trace.sampler.takes_timestamps
    found = [(at_ns, _stamp(call, name, at_ns)) for name, at_ns in call.events if takes_timestamps]
    found += [
        (at_ns, {"id": call.id, "activity": activity, "tensor": _document(tensor)})
        for activity, at_ns, tensor in call.tensors
    ]
    if call.version:
        model: dict[str, Any] = {"id": call.id, "model_name": call.model, "model_version": call.version}
        if call.request_id:
            model["request_id"] = call.request_id
        if call.parent is not None:
            model["parent_id"] = call.parent.id
        yield model
    found.sort(key=lambda each: each[0])
    for _, record in found:
        yield record


def _stamp(call: TracedCall, name: str, at_ns: int) -> dict[str, Any]:
    return {"id": call.id, "timestamps": [{"name": name, "ns": at_ns}]}


def _document(tensor: CopiedTensor) -> dict[str, str]:
    shape = ",".join(map(str, tensor.shape))
    return {"name": tensor.name, "data": text_of(tensor), "shape": shape, "dtype": tensor.datatype}
