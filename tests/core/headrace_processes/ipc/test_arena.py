from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.messages.tensor import BytesTensor
from headrace_processes.ipc.arena import IDLE_BYTES, KEPT_BYTES, STEP_BYTES, Arena, Reader, Writer

MIB = 1024 * 1024
SIZE = 16 * 1024
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux")


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena.create(MIB)
    yield made
    made.close()


def pattern(seed: int, nbytes: int) -> memoryview:
    return memoryview(random.Random(seed).randbytes(nbytes))


def ignore(offset: int) -> None:
    """Ignore the offset."""


# ---------------------------------------------------------------------- allocation

sizes = st.one_of(st.integers(0, 200), st.integers(0, SIZE), st.just(SIZE + 1), st.just(1 << 62))
steps = st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 1 << 30)), max_size=40)


def holes(taken: dict[int, int]) -> list[tuple[int, int]]:
    """Return the free blocks as (begin, size), computed from the blocks in use, each rounded up to 64 bytes."""
    edges = [0, *[edge for offset in sorted(taken) for edge in (offset, offset + room(taken[offset]))], SIZE]
    return [(begin, end - begin) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin]


def room(nbytes: int) -> int:
    return max(64, (nbytes + 63) // 64 * 64)


@settings(deadline=None)
@given(steps)
def test_blocks_are_aligned_apart_intact_and_placed_first_fit(steps: list[tuple[bool, int, int]]) -> None:
    arena = Arena.create(SIZE)
    writer, reader = Writer(arena), Reader(arena)
    taken: dict[int, int] = {}
    for is_release, nbytes, number in steps:
        if is_release and taken:
            offset = sorted(taken)[number % len(taken)]
            assert reader.view(offset, taken[offset], ignore).tobytes() == pattern(offset, taken.pop(offset))
            writer.release(offset)
            continue
        expected = next((begin for begin, size in holes(taken) if size >= room(nbytes)), None)
        found = writer.reserve(nbytes)
        assert found == expected
        if found is not None:
            assert found % 64 == 0
            taken[found] = nbytes
            writer.view(found, nbytes)[:] = pattern(found, nbytes)
    for offset, nbytes in taken.items():
        assert reader.view(offset, nbytes, ignore).tobytes() == pattern(offset, nbytes)
        writer.release(offset)
    assert writer.place(pattern(0, SIZE)) == 0
    arena.close()


def test_a_release_of_an_unused_offset_is_refused_and_changes_nothing(arena: Arena) -> None:
    writer = Writer(arena)
    offset = writer.place(pattern(1, 100))
    assert offset is not None
    for wrong in (offset + 64, offset + 1, -1, 2**63 - 1, 2**64 - 1):
        with pytest.raises(ValueError, match=f"no block begins at {wrong}"):
            writer.release(wrong)
    writer.release(offset)
    with pytest.raises(ValueError, match="no block"):
        writer.release(offset)
    assert writer.reserve(MIB) == 0


def test_a_negative_reservation_is_refused(arena: Arena) -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        Writer(arena).reserve(-1)


def test_arrays_of_any_dtype_and_of_no_elements_are_placed_as_their_bytes(arena: Arena) -> None:
    writer, reader = Writer(arena), Reader(arena)
    for array in (np.arange(6, dtype=np.float64).reshape(2, 3), np.zeros((0, 3)), np.array(7, np.int16)):
        offset = writer.place(array.data)
        assert offset is not None
        assert reader.view(offset, array.nbytes, ignore).tobytes() == array.tobytes()


# ---------------------------------------------------------------------- memory


def resident(arena: Arena) -> int:
    """Return the bytes that the system has allocated for the file."""
    return os.fstat(arena.fd).st_blocks * 512


@linux_only
def test_memory_is_taken_as_it_is_used() -> None:
    arena = Arena.create(1 << 36)
    assert resident(arena) == 0
    Writer(arena).place(pattern(1, MIB))
    assert MIB <= resident(arena) <= MIB + STEP_BYTES
    arena.close()


@linux_only
def test_pages_of_a_large_tensor_are_returned_and_can_be_allocated_again() -> None:
    arena = Arena.create(4 * KEPT_BYTES)
    writer, reader = Writer(arena), Reader(arena)
    for _ in range(2):
        small, large = writer.place(pattern(1, 100)), writer.place(memoryview(bytes(2 * KEPT_BYTES)))
        assert small is not None
        assert large is not None
        writer.release(large)
        assert resident(arena) > 2 * KEPT_BYTES, "pages are kept while there is traffic"
        assert reader.view(small, 100, ignore).tobytes() == pattern(1, 100)
        writer.release(small)
        assert resident(arena) <= KEPT_BYTES
    arena.close()


def test_an_arena_has_no_name_and_its_descriptor_is_not_inherited(arena: Arena) -> None:
    assert os.fstat(arena.fd).st_nlink == 0
    assert not os.get_inheritable(arena.fd)
    if sys.platform == "linux":
        assert str(Path(f"/proc/self/fd/{arena.fd}").readlink()).startswith("/memfd:")


@linux_only
def test_without_memory_there_is_no_room_instead_of_a_bus_error(tmp_path: Path) -> None:
    done = in_small_tmpfs(
        """
import os, sys
from headrace_processes.ipc.arena import Arena, Writer
fd = os.open(sys.argv[1] + "/arena", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 8 << 20)
writer = Writer(Arena.attach(fd, 8 << 20))
print(*[writer.place(memoryview(bytes(size))) for size in (512 << 10, 1 << 20, 64 << 10)])
""",
        tmp_path,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["0", "None", str(512 << 10)]), done.stderr


def in_small_tmpfs(source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``source`` with a private file system of 1 MiB mounted at ``folder``."""
    unshare = shutil.which("unshare")
    space = [unshare or "", "--user", "--map-root-user", "--mount"]
    if unshare is None or subprocess.run([*space, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    mount = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
    command = [*space, "sh", "-c", mount, str(folder), sys.executable, "-c", source, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


# ---------------------------------------------------------------------- views


derived: dict[str, Callable[[Any], Any]] = {
    "the view": lambda view: view,
    "a slice": lambda view: view[3:50],
    "a slice of a slice": lambda view: view[3:50][::2][1:],
    "a reshape": lambda view: view.reshape(2, 50),
    "another dtype": lambda view: view.view(np.float32).reshape(5, 5).T,
    "frombuffer": lambda view: np.frombuffer(view, np.int16, 8, 2).reshape(2, 4)[1:],
    "a memoryview": lambda view: memoryview(view),
    "a slice of a memoryview": lambda view: memoryview(view)[4:8],
    "strings": lambda view: BytesTensor(memoryview(view)[0:8], (1,)).reshape((1, 1)),
    "a broadcast": lambda view: np.broadcast_to(view, (3, 100)),
    "asarray": lambda view: np.asarray(view.view(np.int8))[None],
    "an iterator": lambda view: view.flat,
    "dlpack": lambda view: np.from_dlpack(view)[1:],
}


@pytest.mark.parametrize("make", derived.values(), ids=derived.keys())
def test_a_block_is_freed_once_with_its_last_view(arena: Arena, make: Callable[[Any], Any]) -> None:
    make(np.zeros(100, np.uint8))  # imports happen here, before the measurement
    writer, reader = Writer(arena), Reader(arena)
    other, offset = writer.place(pattern(1, 64)), writer.place(pattern(2, 100))
    assert other is not None
    assert offset is not None
    freed: list[int] = []
    view = reader.view(offset, 100, freed.append)
    assert view.tobytes() == pattern(2, 100)
    last_reference = make(view)
    del view
    assert freed == []
    del last_reference
    assert freed == [offset]


def test_two_views_of_one_place_are_freed_each(arena: Arena) -> None:
    reader, freed = Reader(arena), list[int]()
    views = [reader.view(0, 64, freed.append) for _ in range(2)]
    del views[0]
    assert freed == [0]
    views.clear()
    assert freed == [0, 0]


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(-1, 1), (0, -1), (0, MIB + 1), (MIB, 1), (1, MIB), (2**63 - 1, 1), (1, 2**63 - 1), (2**63 - 1, 2**63 - 1)],
)
def test_bytes_outside_the_arena_cannot_be_viewed(arena: Arena, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match=f"{nbytes} bytes at {offset} are not in an arena of {MIB}"):
        Reader(arena).view(offset, nbytes, ignore)


@pytest.mark.parametrize("offset", [0, 1, MIB - 1, MIB])
def test_no_bytes_can_be_viewed_anywhere_in_the_arena(arena: Arena, offset: int) -> None:
    freed: list[int] = []
    assert Reader(arena).view(offset, 0, freed.append).size == 0
    assert freed == [offset]


def test_views_outlive_the_arena_which_allocates_no_more(arena: Arena) -> None:
    writer, reader = Writer(arena), Reader(arena)
    offset = writer.place(pattern(3, 1000))
    assert offset is not None
    freed: list[int] = []
    view = reader.view(offset, 1000, freed.append)
    arena.close()
    arena.close()
    assert view.tobytes() == pattern(3, 1000)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(arena.fd)
    assert writer.place(pattern(4, 10)) is None
    writer.release(offset)
    with pytest.raises(ValueError, match="not in an arena"):
        reader.view(offset, 1000, ignore)
    del view
    assert freed == [offset]


@linux_only
def test_the_last_view_of_a_closed_arena_takes_the_mapping_with_it() -> None:
    arena = Arena.create(MIB)
    descriptors, mappings = len(list(Path("/proc/self/fd").iterdir())), mapped()
    view = Reader(arena).view(0, 10, ignore)
    arena.close()
    assert mapped() == mappings
    del view
    assert mapped() == mappings - 1
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors - 2, "the arena's, and the mapping's own"


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:headrace")


# ---------------------------------------------------------------------- two processes

PEER = """
import random, sys, zlib
from headrace_processes.ipc.arena import Arena, Reader
dice, held, freed = random.Random(5), [], []
reader = Reader(Arena.attach(int(sys.argv[1]), int(sys.argv[2])))
for line in sys.stdin:
    if line.strip():
        offset, nbytes = map(int, line.split())
        held.append(reader.view(offset, nbytes, freed.append)[:])
        held[-1] = held[-1], zlib.crc32(held[-1])
    dice.shuffle(held)
    for _ in range(min(len(held), dice.choice((0, 0, 1, 3)))):
        view, was = held.pop()
        assert zlib.crc32(view) == was, "overwritten while it was looked at"
        view = None
    print(*freed, flush=True)
    freed.clear()
"""

HOSTILE = """
import os, random, sys
fd, size = int(sys.argv[1]), int(sys.argv[2])
for target in (0, 4096, 2 * size):
    try:
        os.ftruncate(fd, target)
        print("done", flush=True)
    except PermissionError:
        print("refused", flush=True)
for _ in sys.stdin:
    os.pwrite(fd, os.urandom(65536), random.randrange(0, size - 65536))
    print(flush=True)
"""


@contextlib.contextmanager
def peer(source: str, arena: Arena) -> Iterator[subprocess.Popen[str]]:
    """Start a process with the arena's descriptor. It must have exited with status 0 when the block ends."""
    command = [sys.executable, "-c", source, str(arena.fd), str(arena.size)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, pass_fds=(arena.fd,), stdin=pipe, stdout=pipe, text=True) as process:
        yield process
    assert process.returncode == 0


def exchange(process: subprocess.Popen[str], line: str) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return process.stdout.readline()


def test_another_process_reads_a_block_as_long_as_it_has_a_view(arena: Arena) -> None:
    writer, dice, refused, live = Writer(arena), random.Random(4), 0, set[int]()
    with peer(PEER, arena) as process:
        for number in range(500):
            content = pattern(number, dice.choice((0, 1, 64, 5000, 200_000)))
            if (offset := writer.place(content)) is None:
                refused += 1
            else:
                assert offset not in live
                live.add(offset)
            for freed in map(int, exchange(process, "" if offset is None else f"{offset} {content.nbytes}").split()):
                live.remove(freed)
                writer.release(freed)
    assert refused, "the arena was never full: the test is too mild"


@linux_only
def test_a_hostile_peer_spoils_contents_and_nothing_else(arena: Arena) -> None:
    writer, reader, dice = Writer(arena), Reader(arena), random.Random(6)
    live: list[tuple[int, int]] = []
    with peer(HOSTILE, arena) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == ["refused\n"] * 3
        for number in range(100):
            nbytes = dice.randrange(20_000)
            if (offset := writer.place(pattern(number, nbytes))) is not None:
                live.append((offset, nbytes))
            exchange(process, "")
            zlib.crc32(reader.view(*live[dice.randrange(len(live))], ignore).data)
    for offset, _ in live:
        writer.release(offset)
    assert writer.reserve(MIB) == 0
    assert os.fstat(arena.fd).st_size == MIB


def test_a_descriptor_of_a_smaller_file_is_not_attached(arena: Arena) -> None:
    with pytest.raises(ValueError, match=f"an arena of {MIB} bytes, expected {MIB + 1}"):
        Arena.attach(arena.fd, MIB + 1)


@linux_only
def test_pages_go_back_when_an_arena_has_not_been_used_for_a_while() -> None:
    """Also the pages kept for the next large tensor: a request of 200 MiB once left 64 MiB for ever."""
    arena = Arena.create(4 * KEPT_BYTES)
    writer = Writer(arena)
    try:
        offset = writer.place(memoryview(bytes(2 * KEPT_BYTES)))
        assert offset is not None
        writer.shrink()
        writer.shrink()
        assert resident(arena) >= 2 * KEPT_BYTES, "it is in use"
        writer.release(offset)
        assert resident(arena) == KEPT_BYTES
        offset = writer.place(memoryview(bytes(KEPT_BYTES)))
        assert offset is not None
        writer.release(offset)
        writer.shrink()
        assert resident(arena) == KEPT_BYTES, "it has just been used"
        writer.shrink()
        assert resident(arena) <= IDLE_BYTES
        assert not writer.can_shrink
        content = bytes(range(256)) * 40_000
        offset = writer.place(memoryview(content))
        assert offset is not None
        assert bytes(writer.view(offset, len(content))) == content
    finally:
        arena.close()
    assert not writer.can_shrink, "no further call is needed"
