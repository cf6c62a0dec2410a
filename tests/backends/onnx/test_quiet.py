"""ONNX Runtime sends no telemetry."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("onnxruntime")


def test_the_engine_writes_no_files_to_the_home_directory(tmp_path: Path) -> None:
    """It keeps unsent telemetry there."""
    environ = {**os.environ, "HOME": str(tmp_path), "TMPDIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environ.pop("ORT_DISABLE_TELEMETRY", None)
    load = "from headrace_onnx.session import load_engine; load_engine().InferenceSession"
    subprocess.run([sys.executable, "-c", load], env=environ, timeout=100, check=True)
    assert list(tmp_path.rglob("*")) == []
