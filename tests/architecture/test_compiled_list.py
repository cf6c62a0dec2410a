"""The list of compiled modules in core/pyproject.toml names modules that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nox.project
import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "core/src"
PROJECT: dict[str, Any] = nox.project.load_toml(ROOT / "core/pyproject.toml")
HOOK: dict[str, Any] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]
COMPILED = {pattern: set(SOURCE.glob(pattern)) for pattern in HOOK["compiled"]}
LEFT_OUT = {pattern: set(SOURCE.glob(pattern)) for pattern in HOOK["not-compiled"]}


@pytest.mark.parametrize("pattern", [*COMPILED, *LEFT_OUT])
def test_every_pattern_matches_a_module(pattern: str) -> None:
    found = COMPILED.get(pattern) or LEFT_OUT[pattern]
    assert found
    assert all(path.suffix == ".py" and path.is_file() for path in found)


@pytest.mark.parametrize("pattern", LEFT_OUT)
def test_nothing_is_left_out_that_was_not_in(pattern: str) -> None:
    assert LEFT_OUT[pattern] & set().union(*COMPILED.values())


def test_only_who_asks_for_it_needs_a_compiler() -> None:
    assert HOOK["enable-by-default"] is False
    assert not [needed for needed in PROJECT["build-system"]["requires"] if "cython" in needed.lower()]


def test_what_a_child_runs_as_a_program_stays_a_file_that_python_reads() -> None:
    left_out = set().union(*LEFT_OUT.values())
    programs = [path for path in SOURCE.rglob("*.py") if 'if __name__ == "__main__"' in path.read_text()]
    assert programs
    assert not set().union(*COMPILED.values()) - left_out & set(programs)


def test_what_works_in_slices_is_interpreted() -> None:
    """Compiled code keeps the interpreter's lock from slice to slice: the event loop would wait for all of them."""
    left_out = set().union(*LEFT_OUT.values())
    in_slices = {path for path in SOURCE.rglob("*.py") if re.search(r"import .*\bSLICE_BYTES\b", path.read_text())}
    assert SOURCE / "headrace_http/large_documents.py" in in_slices
    assert not set().union(*COMPILED.values()) - left_out & in_slices


def test_asynchronous_generators_are_interpreted() -> None:
    """One that ends before anybody has asked it is nothing to Python; compiled, it warns that it was never awaited."""

    def has_one(path: Path) -> bool:
        functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.AsyncFunctionDef)]
        return any(isinstance(node, ast.Yield) for function in functions for node in ast.walk(function))

    left_out = set().union(*LEFT_OUT.values())
    assert has_one(SOURCE / "headrace_grpc/stream_calls.py")
    assert not [path for path in set().union(*COMPILED.values()) - left_out if has_one(path)]
