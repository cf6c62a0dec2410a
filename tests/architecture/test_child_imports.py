"""A child process imports only the standard library, NumPy and Headrace: its interpreter may be that of a model's own
environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "headrace": ROOT / "core/src",
    "headrace_engines": ROOT / "core/src",
    "headrace_processes": ROOT / "core/src",
    "headrace_python": ROOT / "backends/python/src",
    "triton_python_backend_utils": ROOT / "backends/python/src",
}
BOOTSTRAP = ROOT / "core/src/headrace_processes/supervision/bootstrap.py"

#: The entry that the bootstrap calls: imports ``wanted`` where nothing else can be found.
PROBE = """
import sys
from importlib import import_module

ALLOWED = {*sys.stdlib_module_names, "numpy", "headrace", "probe"}
ALLOWED |= {"headrace_engines", "headrace_processes", "headrace_python", "triton_python_backend_utils"}


class Wall:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ImportError(f"a child imports {name}")


def run(wanted):
    sys.meta_path.insert(0, Wall())
    for name in wanted:
        import_module(name)
    print("imported", len(wanted))
"""


def run(tmp_path: Path, *wanted: str) -> subprocess.CompletedProcess[str]:
    """Return the output of a child that imports ``wanted``, in an interpreter that has NumPy but not Headrace."""
    (tmp_path / "probe.py").write_text(PROBE)
    folders = {name: str(folder) for name, folder in PACKAGES.items()} | {"probe": str(tmp_path)}
    arguments = json.dumps({"entry": "probe:run", "packages": folders, "wanted": wanted})
    command = [sys.executable, str(BOOTSTRAP), "m_0_0", arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)


@pytest.mark.parametrize(
    "wanted", ["headrace_processes.child_main", "headrace_engines.private_modules", "headrace_python.entries"]
)
def test_a_child_imports_nothing_but_numpy(tmp_path: Path, wanted: str) -> None:
    found = run(tmp_path, wanted)
    assert found.stdout == "imported 1\n", found.stderr


def test_an_import_of_anything_else_is_found(tmp_path: Path) -> None:
    found = run(tmp_path, "headrace.config.model_config_pb2")
    assert "a child imports google" in found.stderr


def test_the_modules_beside_the_bootstrap_hide_nobody_elses(tmp_path: Path) -> None:
    """``launch``, ``child`` and ``exits`` may well be names of a model's own modules."""
    found = run(tmp_path, "child")
    assert "a child imports child" in found.stderr
