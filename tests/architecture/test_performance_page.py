"""The page of figures says which build of Python they were measured on."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks/python_build.py"
SPEC = importlib.util.spec_from_file_location("python_build", PROGRAM)
assert SPEC is not None
assert SPEC.loader is not None
python_build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(python_build)

PLAIN = {"CONFIG_ARGS": "'--prefix=/opt/python'", "PGO_PROF_USE_FLAG": "-fprofile-use -fprofile-correction"}
#: Debian 12's python3.
DEBIAN = {"CONFIG_ARGS": "'--enable-shared' '--prefix=/usr' '--with-dtrace'", "PGO_PROF_USE_FLAG": ""}


@pytest.mark.parametrize(
    ("variables", "optimised"),
    [
        (PLAIN, False),
        (PLAIN | {"CONFIG_ARGS": "'--enable-optimizations' '--with-lto'"}, True),
        (DEBIAN, True),
        ({"CONFIG_ARGS": None}, False),
    ],
)
def test_the_build_is_read_from_the_configuration(variables: dict[str, object], optimised: bool) -> None:
    assert python_build.is_optimised(variables) is optimised


def test_the_program_names_the_python_that_runs_it() -> None:
    told = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, check=True).stdout
    version = ".".join(map(str, sys.version_info[:3]))
    assert told.strip("*\n").startswith(f"Python {version}")
    if "--enable-optimizations" in sysconfig.get_config_var("CONFIG_ARGS"):
        assert "(optimised)" in told


def test_every_machine_of_the_page_has_a_build() -> None:
    lines = re.findall(r"^\d+ CPUs .*$", (ROOT / "docs/performance.md").read_text(), re.MULTILINE)
    assert lines
    assert [line for line in lines if not re.search(r"Python [\d.]+(?: \(optimised\)|, built without)", line)] == []
