"""A server whose hot modules are compiled: the sessions `build` (a few of them) and `compiled` (all) have it.

Where what is installed is pure there is nothing to look at.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace import compilation

if TYPE_CHECKING:
    from tests.conftest import Headrace

INSTALLED = compilation.FOLDER
COMPILED = sorted(compilation.compiled_modules(INSTALLED))
pytestmark = pytest.mark.skipif(not COMPILED, reason="pure Python is installed: nox -s compiled, or nox -s build")
CHECK = "messages/tensor"
CONFIG = """
backend: "identity" max_batch_size: 4 dynamic_batching {}
input { name: "IN" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "OUT" data_type: TYPE_FP32 dims: [ 2 ] }
"""
#: An object that is no tensor has none of its attributes, which the compiled function asks for.
RAISING = "from headrace.messages.tensor import wire_view; wire_view(object())"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with ``words``, which finds the ``headrace`` in ``folder``."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=90, check=False)


def command_line(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, "-c", "import sys; from headrace.cli import main; sys.exit(main(sys.argv[1:]))", *words)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The folder of a copy of what is installed, whose source a test may change."""
    shutil.copytree(INSTALLED, tmp_path / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_version_says_how_many_modules_are_compiled_and_by_what(copy: Path) -> None:
    said = command_line(copy, "--version").stdout
    assert said.startswith(f"headrace {metadata.version('headrace')} (compiled: {len(COMPILED)} modules, Cython ")
    assert len(said.splitlines()) == 1


def test_every_module_of_the_record_is_compiled_and_no_other() -> None:
    record = json.loads((INSTALLED / compilation.RECORD).read_text())
    sources = {path.with_name(f"{path.name.partition('.')[0]}.py") for path in COMPILED}
    assert sources == {INSTALLED.parent / name for name in record["sources"]}


def test_a_compiled_server_answers(tmp_path: Path, serve: Callable[..., Headrace]) -> None:
    (tmp_path / "same/1").mkdir(parents=True)
    (tmp_path / "same/config.pbtxt").write_text(CONFIG)
    server = serve(f"--model-repository={tmp_path}")
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1, 2], "data": [1.5, -2.0]}
    asked = urllib.request.Request(
        f"http://127.0.0.1:{server.http}/v2/models/same/infer", json.dumps({"inputs": [tensor]}).encode()
    )
    with urllib.request.urlopen(asked, timeout=90) as answer:
        assert json.load(answer)["outputs"][0]["data"] == [1.5, -2.0]


def test_a_traceback_shows_the_source_of_compiled_code(copy: Path) -> None:
    told = run(copy, "-c", RAISING).stderr
    assert 'headrace/messages/tensor.py", line ' in told
    assert "wire_view\n    if not tensor.flags.c_contiguous:\n" in told


def test_compiled_code_whose_source_has_changed_is_refused_by_name(copy: Path) -> None:
    source = copy / f"headrace/{CHECK}.py"
    source.write_text(source.read_text() + "\n# a breakpoint, say\n")
    for words in (["serve", "--model-repository=."], ["plugins"]):
        refused = command_line(copy, *words)
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"headrace: headrace/{CHECK}.py in {copy}: changed since compiled")
    assert f"\nheadrace/{CHECK}.py in {copy}: changed since compiled" in command_line(copy, "--version").stdout
    in_python = run(copy, "-c", "import headrace; headrace.Server('.')")
    assert f"ConfigError: headrace/{CHECK}.py in {copy}: changed since compiled" in in_python.stderr


def test_what_is_written_runs_once_the_compiled_module_is_deleted(copy: Path) -> None:
    source = copy / f"headrace/{CHECK}.py"
    source.write_text(source.read_text() + "\nprint('what is written')\n")
    for compiled in source.parent.glob(f"{source.stem}.*.so"):
        compiled.unlink()
    told = command_line(copy, "plugins")
    assert (told.returncode, "what is written\n" in told.stdout) == (0, True)
