"""The cache: bounded, shared by servers, repaired after modifications, and clean after a crash."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace import ConfigError, LoadError, Storage, Unavailable
from headrace_cloud import cache_entry
from headrace_cloud.cache_entry import entry_name, sync
from headrace_cloud.file_cache import LINKED_BYTES, FileCache
from headrace_cloud.stored_objects import PART_BYTES
from tests.storages.cloud.faulty_s3 import FaultyS3, Handler, faulty_s3
from tests.storages.cloud.opened_storage import new_directories, open_storage

KIB = 1 << 10


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., FileCache]:
    def cache(max_bytes: int = 100 * KIB, closing: threading.Event | None = None) -> FileCache:
        return FileCache(tmp_path / "cache", max_bytes, closing or threading.Event())

    return cache


class Source:
    """A file to download. ``count`` is the number of started downloads."""

    def __init__(self, content: bytes) -> None:
        self.content, self.count = content, 0
        self.name, self.size = entry_name(content), len(content)

    def __call__(self, descriptor: int) -> None:
        self.count += 1
        os.pwrite(descriptor, self.content, 0)


def _entries(cache: FileCache) -> set[str]:
    return {path.name for path in (cache.path / "files").iterdir()}


def _partial(cache: FileCache) -> list[Path]:
    return list((cache.path / "partial").iterdir())


def test_a_file_is_downloaded_once(make: Callable[..., FileCache], tmp_path: Path) -> None:
    cache, source = make(), Source(b"content")
    assert not cache.place(source.name, source.size, tmp_path / "a", source)
    assert cache.place(source.name, source.size, tmp_path / "b", source)
    assert make().place(source.name, source.size, tmp_path / "c", source), "another server has it, too"
    assert source.count == 1
    assert {(tmp_path / each).read_bytes() for each in "abc"} == {b"content"}
    assert _partial(cache) == []


def test_an_empty_file_is_kept(make: Callable[..., FileCache], tmp_path: Path) -> None:
    cache, source = make(), Source(b"")
    cache.place(source.name, 0, tmp_path / "a", source)
    assert cache.place(source.name, 0, tmp_path / "b", source)
    assert (tmp_path / "b").read_bytes() == b""


def test_a_small_file_is_copied_and_a_large_one_is_linked(make: Callable[..., FileCache], tmp_path: Path) -> None:
    cache = make(100 << 20)
    small, large = Source(b"s"), Source(bytes(LINKED_BYTES + 1))
    for each in (small, large):
        cache.place(each.name, each.size, tmp_path / each.name, each)
    (tmp_path / small.name).write_bytes(b"written by the model")
    assert cache.place(small.name, small.size, tmp_path / "b", small)
    assert (tmp_path / "b").read_bytes() == b"s"
    linked = (tmp_path / large.name).stat()
    assert (linked.st_nlink, linked.st_mode & 0o777) == (2, 0o400)


def _with_its_times(path: Path, change: Callable[[], object]) -> None:
    """Change an entry and restore its times."""
    found = path.lstat()
    change()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns), follow_symlinks=False)


def _link(path: Path) -> None:
    """Put a link in the place of an entry of 7 bytes, which is as long as the path that it leads to."""
    path.unlink()
    path.symlink_to("/bin/sh")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda path: path.write_bytes(b"CONTENT"), id="written"),
        pytest.param(lambda path: path.write_bytes(b"longer content"), id="longer"),
        pytest.param(lambda path: path.unlink(), id="removed"),
        pytest.param(lambda path: _with_its_times(path, lambda: path.write_bytes(b"longer content")), id="times kept"),
        pytest.param(lambda path: _with_its_times(path, lambda: _link(path)), id="a link"),
    ],
)
def test_a_modified_cache_entry_is_downloaded_again(
    change: Callable[[Path], object], make: Callable[..., FileCache], tmp_path: Path
) -> None:
    cache, source = make(), Source(b"content")
    cache.place(source.name, source.size, tmp_path / "a", source)
    change(cache.path / "files" / source.name)
    assert not cache.has(source.name, source.size)
    cache.place(source.name, source.size, tmp_path / "b", source)
    assert (tmp_path / "b").read_bytes() == b"content"
    assert source.count == 2


def test_after_a_machine_crash_only_synced_files_are_used(
    make: Callable[..., FileCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, safe, unsafe = make(), Source(b"on the disk"), Source(b"perhaps not")
    for each in (safe, unsafe):
        cache.place(each.name, each.size, tmp_path / each.name, each)
    sync(cache.path / "files" / safe.name)
    assert cache.has(safe.name, safe.size)
    assert cache.has(unsafe.name, unsafe.size)
    (tmp_path / "boot_id").write_text("another boot")
    monkeypatch.setattr(cache_entry, "_BOOT", tmp_path / "boot_id")
    assert cache.has(safe.name, safe.size)
    assert not cache.has(unsafe.name, unsafe.size)


def test_a_modified_cache_entry_is_not_safe(make: Callable[..., FileCache], tmp_path: Path) -> None:
    cache, source = make(), Source(b"content")
    cache.place(source.name, source.size, tmp_path / "a", source)
    (cache.path / "files" / source.name).write_bytes(b"CONTENT")
    sync(cache.path / "files" / source.name)
    sync(cache.path / "files" / "nothing")
    assert not cache.has(source.name, source.size)


def test_the_least_recently_used_is_removed_first(make: Callable[..., FileCache], tmp_path: Path) -> None:
    cache = make(30 * KIB)
    first, second, third = (Source(bytes([number]) * 10 * KIB) for number in range(3))
    for each in (first, second, third):
        cache.place(each.name, each.size, tmp_path / each.name, each)
    cache.place(first.name, first.size, tmp_path / "again", first)  # it is used
    cache.make_room(10 * KIB)
    assert _entries(cache) == {first.name, third.name}
    cache.make_room(0)
    assert _entries(cache) == {first.name, third.name}


def test_entries_in_use_are_not_removed(make: Callable[..., FileCache], tmp_path: Path) -> None:
    cache = make(30 * KIB)
    wanted, other = Source(bytes(10 * KIB)), Source(bytes(20 * KIB))
    for each in (wanted, other):
        cache.place(each.name, each.size, tmp_path / each.name, each)
    assert cache.has(wanted.name, wanted.size)
    cache.make_room(10 * KIB)
    assert _entries(cache) == {wanted.name}


@pytest.mark.parametrize("folder", ["", "files", "partial"])
def test_a_removed_cache_is_created_again(folder: str, make: Callable[..., FileCache], tmp_path: Path) -> None:
    """As by a program that empties the temporary directory."""
    cache, source = make(), Source(b"content")

    def download(descriptor: int) -> None:
        shutil.rmtree(cache.path / folder)
        source(descriptor)

    with pytest.raises(LoadError, match=r"the cache '.*' was removed while it was in use"):
        cache.place(source.name, source.size, tmp_path / "a", download)
    cache.make_room(source.size)
    cache.place(source.name, source.size, tmp_path / "b", source)
    assert (tmp_path / "b").read_bytes() == b"content"


def test_a_file_too_large_for_the_cache_is_used_uncached(make: Callable[..., FileCache], tmp_path: Path) -> None:
    cache, source = make(KIB), Source(bytes(2 * KIB))
    cache.place(source.name, source.size, tmp_path / "a", source)
    assert (tmp_path / "a").read_bytes() == source.content
    assert _entries(cache) == set()
    nothing = make(0)
    nothing.place(source.name, source.size, tmp_path / "b", source)
    nothing.make_room(source.size)
    assert source.count == 2


def test_an_empty_file_needs_no_cache(make: Callable[..., FileCache], tmp_path: Path) -> None:
    source = Source(b"")
    make(0).place(source.name, 0, tmp_path / "a", source)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failed_download_leaves_no_file(make: Callable[..., FileCache], tmp_path: Path) -> None:
    cache = make()

    def fail(descriptor: int) -> None:
        os.pwrite(descriptor, b"half", 0)
        raise LoadError("the storage fails")

    with pytest.raises(LoadError, match="the storage fails"):
        cache.place(entry_name("x"), 10, tmp_path / "a", fail)
    assert (_entries(cache), _partial(cache), list(tmp_path.glob("a"))) == (set(), [], [])


def test_a_full_disk_is_detected_before_the_download(
    make: Callable[..., FileCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, source = make(100 << 20), Source(bytes(PART_BYTES + 1))

    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        LoadError, match=r"is full: 8388609 bytes do not fit\. --cloud-cache-directory names another place"
    ):
        cache.place(source.name, source.size, tmp_path / "a", source)
    assert source.count == 0
    assert (_entries(cache), _partial(cache)) == (set(), [])


def test_a_file_larger_than_the_disk_evicts_nothing(
    make: Callable[..., FileCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, source = make(2**63), Source(bytes(10 * KIB))
    cache.place(source.name, source.size, tmp_path / "a", source)
    with pytest.raises(LoadError, match="is full: 4611686018427387904 bytes do not fit"):
        cache.make_room(2**62)
    assert _entries(cache) == {source.name}
    monkeypatch.setattr(cache, "_free", lambda: 0)  # removed, but not free: models have links to it
    with pytest.raises(LoadError, match="is full: 5 bytes do not fit"):
        cache.make_room(5)


def test_a_full_model_disk_is_distinguished_from_a_full_cache_disk(
    make: Callable[..., FileCache], tmp_path: Path
) -> None:
    def fill(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(LoadError, match=f"the disk of '{tmp_path}' is full: 7 bytes do not fit. TMPDIR names another"):
        make(0).place(entry_name("x"), 7, tmp_path / "a", fill)


def test_threads_and_servers_wait_for_one_download(make: Callable[..., FileCache], tmp_path: Path) -> None:
    caches, source = [make() for _ in range(4)], Source(b"content")
    with ThreadPoolExecutor(8) as pool:
        placed = [
            pool.submit(caches[number % 4].place, source.name, source.size, tmp_path / str(number), source)
            for number in range(8)
        ]
        assert sorted(each.result() for each in placed) == [False] + [True] * 7
    assert source.count == 1
    assert {(tmp_path / str(number)).read_bytes() for number in range(8)} == {b"content"}


def test_a_stopping_server_does_not_wait_for_a_download_of_another(
    make: Callable[..., FileCache], tmp_path: Path
) -> None:
    closing, source = threading.Event(), Source(b"content")
    stopping, begun, gate = make(closing=closing), threading.Event(), threading.Event()

    def download(descriptor: int) -> None:
        begun.set()
        gate.wait()
        source(descriptor)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(make().place, source.name, source.size, tmp_path / "a", download)
        begun.wait()
        second = pool.submit(stopping.place, source.name, source.size, tmp_path / "b", source)
        closing.set()
        with pytest.raises(Unavailable, match="the server is stopping"):
            second.result()
        gate.set()
        first.result()


def test_a_directory_of_another_user_is_refused(
    make: Callable[..., FileCache], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        with pytest.raises(ConfigError, match="is not a directory that only the server's user can write to"):
            make()

    path = make().path
    for mode in (0o720, 0o702):
        path.chmod(mode)
        refused()
    path.chmod(0o700)
    path.rename(elsewhere := tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    refused()
    path.unlink()
    path.write_bytes(b"")
    path.chmod(0o600)
    refused()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    elsewhere.rename(path.with_name("headrace-cloud-4711"))
    refused()


# ---------------------------------------------------------------------------
# Whole storages
# ---------------------------------------------------------------------------

_FETCH = """
import sys
from pathlib import Path
from tests.storages.cloud.opened_storage import new_directories, open_storage
storage = open_storage(sys.argv[1])
print("fetching", flush=True)
print(storage.fetch("m", ["1/w"], new_directories(Path(sys.argv[2]))), flush=True)
"""


def _fetching(s3: FaultyS3, folder: Path) -> subprocess.Popen[str]:
    """Start a process that fetches the model."""
    words = [sys.executable, "-c", _FETCH, s3.url, str(folder)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])


@pytest.fixture
def s3(s3_keys: None) -> Iterator[FaultyS3]:
    with faulty_s3() as found:
        found.put({"m/1/w": os.urandom(PART_BYTES + 1)})
        yield found


@pytest.fixture
def storage(s3: FaultyS3) -> Storage:
    return open_storage(s3.url)


def _reads(s3: FaultyS3) -> int:
    return sum(path.endswith("/w") for path in s3.requests)


def test_two_processes_download_a_file_once_and_a_killed_one_is_replaced(
    s3: FaultyS3, storage: Storage, tmp_path: Path
) -> None:
    started, gate = threading.Semaphore(0), threading.Event()

    def hold(request: Handler) -> bool:
        if not request.is_listing:
            started.release()
            gate.wait()
        return False

    s3.fault = hold
    with _fetching(s3, tmp_path / "a") as killed:
        for _ in range(2):  # parts
            started.acquire()
        with _fetching(s3, tmp_path / "b") as waiting:
            assert waiting.stdout is not None
            assert waiting.stdout.readline() == "fetching\n"
            killed.kill()  # in the middle of its download, with the lock
            started.acquire()
            gate.set()
            found = Path(waiting.stdout.read().strip())
        assert (found / "1/w").read_bytes() == s3.objects["models/m/1/w"]
    assert _reads(s3) == 4
    fetched = storage.fetch("m", ["1/w"], new_directories(tmp_path / "c"))
    assert (fetched / "1/w").read_bytes() == s3.objects["models/m/1/w"]
    assert _reads(s3) == 4


def test_files_of_a_killed_server_are_removed_at_the_next_start(s3: FaultyS3, tmp_path: Path) -> None:
    started, gate = threading.Event(), threading.Event()

    def hold(request: Handler) -> bool:
        if not request.is_listing:
            started.set()
            gate.wait()
        return False

    s3.fault = hold
    folder = Path(os.environ["TRITON_AWS_MOUNT_DIRECTORY"]) / f"headrace-cloud-{os.geteuid()}" / "partial"
    with _fetching(s3, tmp_path / "a") as process:
        started.wait()
        assert len(list(folder.iterdir())) == 1
        open_storage(s3.url)  # another server that starts removes nothing
        assert len(list(folder.iterdir())) == 1
        process.kill()
    gate.set()
    open_storage(s3.url)
    assert list(folder.iterdir()) == []
