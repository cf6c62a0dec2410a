"""Which process runs the tests of a module, in a real run of pytest with two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from tests.whole_modules import UNDIVIDED, cut

ROOT = Path(__file__).parents[2]
#: Sizes of modules. Cut at half of the tests, the third of each would be divided.
SIZES = {"test_a.py": 5, "test_b.py": 1, "test_c.py": 9, "test_d.py": 4, "test_e/test_f.py": 3, "test_e/test_g.py": 6}
CONFTEST = f"""
from tests import whole_modules

whole_modules.UNDIVIDED = {tuple({name.partition("/")[0] for name in SIZES})}

def pytest_xdist_make_scheduler(config, log):
    return whole_modules.WholeModules(config, log)
"""
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range({}))
def test_process(number):
    with open({!r}, "a") as file:
        print({!r}, os.environ["PYTEST_XDIST_WORKER"], file=file)
"""


def test_one_process_runs_all_tests_of_what_is_not_to_be_divided(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, size in SIZES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(TESTS.format(size, str(tmp_path / "ran"), name.partition("/")[0]))
    words = ("-q", "-n", "2", "--dist", "worksteal", "-p", "no:cacheprovider", "--import-mode=importlib")
    command = [sys.executable, "-m", "pytest", *words, str(tmp_path), f"--rootdir={tmp_path}"]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ, timeout=60, check=False)
    assert f"{sum(SIZES.values())} passed" in done.stdout, done.stdout + done.stderr
    processes = defaultdict(set)
    for line in (tmp_path / "ran").read_text().splitlines():
        module, process = line.split()
        processes[module].add(process)
    assert {len(found) for found in processes.values()} == {1}
    assert set.union(*processes.values()) == {"gw0", "gw1"}


def test_a_cut_is_between_two_modules() -> None:
    tests = ["a.py::x", "a.py::y", "a.py::z", "b.py::x", "c.py::x", "c.py::y"]
    assert [cut(tests, wanted) for wanted in range(6)] == [3, 3, 3, 3, 4, 4]
    assert cut(tests, 3, first=4) == 4
    assert cut(tests[:3], 1) is None


def test_what_is_not_divided_is_there() -> None:
    assert all((ROOT / whole).exists() for whole in UNDIVIDED)
