"""How much memory this process may still use: of the machine, of its control groups, and of its own limits (ulimit)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

#: The file of a control group that has its limit, for the file systems of version 2 and 1.
_LIMIT_FILES = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}


class FreeMemory(NamedTuple):
    """``size_bytes`` are free by the smallest of all limits, which ``rule`` names."""

    size_bytes: int
    rule: str


def free_memory(proc: Path = Path("/proc")) -> FreeMemory:
    """Return what this process may use beside what it uses now, by the smallest limit. Reads some files."""
    return min(_found(proc), key=lambda each: each.size_bytes)


def _found(proc: Path) -> Iterator[FreeMemory]:
    virtual, resident, data = _used(proc)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield FreeMemory(max(0, memory - resident), "the memory of this machine")
    for directory, name in control_groups(proc):
        try:
            text = (directory / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # else "max"
            yield FreeMemory(max(0, int(text) - resident), f"the control group limit {directory / name}")
    if resource is not None:
        for flag, kind, used in (("-v", resource.RLIMIT_AS, virtual), ("-d", resource.RLIMIT_DATA, data)):
            limit = resource.getrlimit(kind)[0]
            if limit != resource.RLIM_INFINITY:
                yield FreeMemory(max(0, limit - used), f"ulimit {flag}")


def control_groups(proc: Path = Path("/proc")) -> Iterator[tuple[Path, str]]:
    """Yield the directory of each control group that limits this process, and the name of its file.

    A group is limited by all groups around it, up to the one that is mounted.
    """
    try:
        groups = (proc / "self/cgroup").read_text().splitlines()
        mounts = (proc / "self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths = {"cgroup2" if number == "0" else "cgroup": path for number, path in _memory_groups(groups)}
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind, options = before.split(), after.split(" ")[0], after.rpartition(" ")[2].split(",")
        if kind not in paths or (kind == "cgroup" and "memory" not in options) or len(fields) < 5:
            continue
        root, point = _unescaped(fields[3]), Path(_unescaped(fields[4]))
        # If the group is outside of what is mounted, as in some containers, the root of the mount is the group.
        inside = os.path.relpath(paths[kind], root)
        found = point if inside.startswith("..") else point / inside
        while True:
            yield found, _LIMIT_FILES[kind]
            if found == point:
                break
            found = found.parent


def _memory_groups(lines: list[str]) -> Iterator[tuple[str, str]]:
    """Yield number and path of the groups of version 2 (number 0), and of version 1 that have memory."""
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" or "memory" in controllers.split(","):
            yield number, path


def _unescaped(text: str) -> str:
    """Return a path of mountinfo, in which blanks are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _used(proc: Path) -> tuple[int, int, int]:
    """Return the bytes of this process: of its addresses, in memory, and of its data; zeros if they are unknown."""
    try:
        fields = [int(field) for field in (proc / "self/statm").read_text().split()]
    except OSError:
        return 0, 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return fields[0] * page, fields[1] * page, fields[5] * page


#: What is free when this is imported: before the event loop runs, which may not wait for files.
AT_START = free_memory()
