"""Python models on disk, for the tests of the Python backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils
"""
#: Takes WHAT, a string, and gives OUT.
WHAT = (
    'input { name: "WHAT" data_type: TYPE_STRING dims: [1] } output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }\n'
)


def write_python(repository: Path, name: str, code: str, config: str = WHAT, **files: str) -> Path:
    """A model of the backend ``python`` in ``repository``; its directory.

    NumPy and pb_utils are imported for ``code``, and ``files`` are modules beside it.
    """
    version = repository / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    (version / "model.py").write_text(HEAD + dedent(code))
    for module, text in files.items():
        (version / f"{module}.py").write_text(dedent(text))
    (version.parent / "config.pbtxt").write_text('backend: "python"\ninstance_group { kind: KIND_CPU }\n' + config)
    return version.parent


@pytest.fixture(scope="session", name="write_python")
def _write_python() -> Callable[..., Path]:
    return write_python


@pytest.fixture
def write_model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Python model into an empty repository."""

    def write(name: str, code: str, config: str = WHAT, **files: str) -> Path:
        return write_python(tmp_path, name, code, config, **files)

    return write
