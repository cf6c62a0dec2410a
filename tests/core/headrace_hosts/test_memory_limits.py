"""The memory that a process may use, by control groups of both versions and by ulimit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace_hosts.memory_limits import control_groups, free_memory

V2 = "31 1 0:27 {root} {point} rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = (
    "31 1 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
    "32 1 0:28 {root} {point} rw,nosuid - cgroup cgroup rw,memory\n"
)


def proc(folder: Path, groups: str, mounts: str, root: str = "/") -> Path:
    """Return a stand-in for /proc, whose control groups are mounted at ``folder``/groups."""
    (folder / "self").mkdir()
    (folder / "self/cgroup").write_text(groups)
    (folder / "self/mountinfo").write_text(mounts.format(root=root, point=folder / "groups"))
    (folder / "self/statm").write_text("1000 200 0 0 0 500 0\n")
    (folder / "groups/outer/inner").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("groups", "mounts", "name"),
    [
        pytest.param("0::/outer/inner\n", V2, "memory.max", id="version 2"),
        pytest.param("5:cpu:/\n4:memory:/outer/inner\n0::/\n", V1, "memory.limit_in_bytes", id="version 1"),
    ],
)
def test_the_smallest_limit_of_all_groups_around_it_counts(tmp_path: Path, groups: str, mounts: str, name: str) -> None:
    found = proc(tmp_path, groups, mounts)
    assert [directory for directory, _ in control_groups(found)] == [
        tmp_path / "groups/outer/inner",
        tmp_path / "groups/outer",
        tmp_path / "groups",
    ]
    (tmp_path / "groups/outer/inner" / name).write_text("900000000\n")
    (tmp_path / "groups/outer" / name).write_text("600000000\n")  # nested: the outer one is smaller
    (tmp_path / "groups" / name).write_text("max\n")
    free = free_memory(found)
    assert free.size_bytes == 600_000_000 - 200 * 4096
    assert str(tmp_path / "groups/outer" / name) in free.rule


def test_a_group_outside_of_what_a_container_has_mounted_is_its_root(tmp_path: Path) -> None:
    found = proc(tmp_path, "0::/docker/abc\n", V2, root="/docker/abc")
    assert [directory for directory, _ in control_groups(found)] == [tmp_path / "groups"]
    (tmp_path / "self/cgroup").write_text("0::/elsewhere\n")
    assert [directory for directory, _ in control_groups(found)] == [tmp_path / "groups"]


def test_without_control_groups_it_is_the_memory_of_the_machine(tmp_path: Path) -> None:
    line = Path("/proc/meminfo").read_text().split("\n", 1)[0]
    free = free_memory(tmp_path)
    assert free.rule == "the memory of this machine"
    assert abs(free.size_bytes - int(line.split()[1]) * 1024) < 4096


@pytest.mark.parametrize(("flag", "kind"), [("-v", "RLIMIT_AS"), ("-d", "RLIMIT_DATA")])
def test_a_limit_of_the_process_counts_without_what_it_uses(flag: str, kind: str) -> None:
    program = (
        f"import resource; resource.setrlimit(resource.{kind}, (1 << 30, 1 << 30));"
        "from headrace_hosts.memory_limits import free_memory; print(*free_memory(), sep='|')"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    size, rule = answer.stdout.strip().split("|")
    assert rule == f"ulimit {flag}"
    assert 0 < int(size) < (1 << 30) - (1 << 22)
