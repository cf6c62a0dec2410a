"""The libraries of a package are read before its import, and those of other packages are not."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from headrace_engines import read_libraries

MIB = 1 << 20


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of a package that was not imported: its libraries are not in memory."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "an_engine"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('it was imported')")
    for name in ("top.so", "lib/libmain.so.2", "lib/notes.txt"):
        path = folder / name
        with path.open("wb") as file:
            file.write(os.urandom(3 * MIB + 5))
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert not in_memory(path)
    yield folder
    assert "an_engine" not in sys.modules


def in_memory(path: Path) -> bool:
    """Return True if the whole file is in the page cache. A read would make the kernel read ahead."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as content:
        first = ctypes.c_char.from_buffer(content)
        pages = (ctypes.c_ubyte * (-(-len(content) // mmap.PAGESIZE)))()
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(len(content)), pages) == 0
        del first
        return all(page & 1 for page in pages)


def test_libraries_are_read_in_the_folders_named_and_nothing_else(package: Path) -> None:
    read_libraries("an_engine", "lib")
    libraries = [in_memory(package / name) for name in ("lib/libmain.so.2", "top.so", "lib/notes.txt")]
    assert libraries == [True, False, False]
    read_libraries("an_engine", "", "no_such_folder")
    assert in_memory(package / "top.so")


def test_imported_library_is_not_read_again(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ModuleType("an_engine")
    engine.__spec__ = importlib.util.find_spec("an_engine")
    monkeypatch.setitem(sys.modules, "an_engine", engine)
    read_libraries("an_engine", "lib")
    assert not in_memory(package / "lib" / "libmain.so.2")
    monkeypatch.delitem(sys.modules, "an_engine")


def test_unreadable_library_is_reported_by_the_import(package: Path) -> None:
    (package / "lib" / "libmain.so.2").unlink()
    (package / "lib" / "libmain.so.2").symlink_to(package / "nothing")
    (package / "lib" / "folder.so").mkdir()
    read_libraries("an_engine", "lib")
    read_libraries("no_such_engine", "lib")
