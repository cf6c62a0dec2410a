"""Brings the files of one model to this machine: many at once, and large ones in parts."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from headrace import LoadError, Unavailable, one_line
from headrace_cloud.cache_entry import entry_name
from headrace_cloud.file_cache import FileCache
from headrace_cloud.stored_objects import PART_BYTES, NoRanges, ObjectStore, StoredObject

log = logging.getLogger(__name__)

_LINE_S = 5.0
_MIB = 1 << 20
_BATCH_BYTES = 8 * PART_BYTES


class ModelDownload:
    """One fetch of ``files`` of ``model`` into ``directory``, with at most ``parallel`` requests at once."""

    def __init__(self, store: ObjectStore, cache: FileCache, parallel: int, closing: threading.Event) -> None:
        self._store, self._cache, self._closing = store, cache, closing
        self._parallel = parallel
        #: False if the server answers a request for a part with the whole object.
        self._has_ranges = True

    def run(self, model: str, files: dict[str, StoredObject], directory: Path) -> None:
        """Write all ``files``, by their paths below ``directory``, which is empty. Raises `HeadraceError`."""
        names = {path: self._entry(each) for path, each in files.items()}
        missing = [path for path, each in files.items() if not self._cache.has(names[path], each.size)]
        total = sum(files[path].size for path in missing)
        self._cache.make_room(sum(files[path].size for path in missing if self._cache.keeps(files[path].size)))
        progress = _Progress(model, len(missing), total)
        try:
            for folder in {(directory / path).parent for path in files}:
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LoadError(f"a folder of model '{model}' cannot be made: {error.strerror}") from error
        small = [path for path in files if files[path].size <= PART_BYTES]
        self._place_small({files[path]: (names[path], directory / path) for path in small}, progress)
        with ThreadPoolExecutor(self._parallel, thread_name_prefix="cloud") as pool:
            try:
                for path in sorted(files.keys() - set(small)):
                    self._place_large(names[path], files[path], directory / path, progress, pool)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        if missing:
            self._cache.make_room(0)
            self._cache.sync_later([names[path] for path in missing])
            progress.end(len(files) - len(missing))

    def _entry(self, each: StoredObject) -> str:
        return entry_name(self._store.identity, each.path, each.size, each.tag)

    def _place_small(self, files: Mapping[StoredObject, tuple[str, Path]], progress: _Progress) -> None:
        """Write files of at most `PART_BYTES`, by their entries and paths. Each is read whole, before it is written."""
        missing = []
        for each, (name, target) in files.items():
            if not self._cache.take(name, each.size, target):
                missing.append(each)
        for batch in _batches(missing):
            for each, read in self._store.read_many(batch):
                self._check_open()
                name, target = files[each]
                self._cache.place(name, each.size, target, partial(_write, part=read))
                progress.add(each.size)

    def _place_large(
        self, name: str, each: StoredObject, target: Path, progress: _Progress, pool: ThreadPoolExecutor
    ) -> None:
        def download(descriptor: int) -> None:
            starts = range(0, each.size, PART_BYTES)
            if not self._has_ranges:
                self._copy_whole(each, descriptor, progress)
                return
            try:
                _results([pool.submit(self._copy_part, each, start, descriptor, progress) for start in starts])
            except NoRanges as error:
                log.warning("%s: large files are downloaded by one request each", error.message)
                self._has_ranges = False
                self._copy_whole(each, descriptor, progress)

        self._cache.place(name, each.size, target, download)

    def _copy_part(self, each: StoredObject, start: int, descriptor: int, progress: _Progress) -> None:
        self._check_open()
        _write(descriptor, self._store.read(each, start, min(start + PART_BYTES, each.size)), start)
        progress.add(min(PART_BYTES, each.size - start))

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise Unavailable("the server is stopping")

    def _copy_whole(self, each: StoredObject, descriptor: int, progress: _Progress) -> None:
        start = 0
        for part in self._store.stream(each):
            self._check_open()
            if start + len(part) <= each.size:
                _write(descriptor, part, start)
            start += len(part)
            progress.add(len(part))


def _batches(objects: Sequence[StoredObject]) -> Iterator[list[StoredObject]]:
    """Yield ``objects`` in lists of at most `_BATCH_BYTES`, which are in memory at once."""
    batch: list[StoredObject] = []
    size = 0
    for each in objects:
        if batch and size + each.size > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += each.size
    if batch:
        yield batch


def _write(descriptor: int, part: memoryview, start: int = 0) -> None:
    written = 0
    while written < len(part):
        written += os.pwrite(descriptor, part[written:], start + written)


def _results(tasks: Collection[Future[None]]) -> None:
    """Wait for ``tasks``.

    If one fails, cancel those that have not started, wait for the others, and raise its error.
    """
    _, waiting = wait(tasks, return_when=FIRST_EXCEPTION)
    for task in waiting:
        task.cancel()
    wait(waiting)
    for task in tasks:
        if not task.cancelled():
            task.result()


class _Progress:
    """Logs how far a download is, every 5 s, and its end."""

    def __init__(self, model: str, files: int, total: int) -> None:
        self._model, self._files, self._total = one_line(model), files, total
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._logged = time.monotonic()

    def add(self, count: int) -> None:
        with self._lock:
            self._done += count
            now = time.monotonic()
            is_due = now - self._logged >= _LINE_S
            if is_due:
                self._logged = now
            done = self._done
        if is_due:
            rate = done / (now - self._began)
            left_s = (self._total - done) / rate if rate else 0
            log.info(
                "model '%s': %d of %d MiB downloaded, %.0f MiB/s, about %.0f s left",
                *(self._model, done // _MIB, self._total // _MIB, rate / _MIB, max(left_s, 0)),
            )

    def end(self, cached: int) -> None:
        """Log the end. ``cached`` is the number of files that the cache had."""
        duration = max(time.monotonic() - self._began, 1e-9)
        log.info(
            "model '%s': downloaded %d files of %.1f MiB in %.1f s, %.0f MiB/s; %d files were in the cache",
            *(self._model, self._files, self._total / _MIB, duration, self._total / _MIB / duration, cached),
        )
