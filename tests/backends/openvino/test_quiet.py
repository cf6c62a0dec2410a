"""OpenVINO sends no telemetry, and does not fork the server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openvino")

LOAD = """
import sys
sys.addaudithook(lambda event, arguments: print(event) if event in ("os.fork", "socket.connect") else None)
from headrace_openvino.openvino_api import load_engine
load_engine().Core()
"""


def test_the_engine_writes_no_files_to_the_home_directory_and_does_not_fork(tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if key not in ("CI", "TF_BUILD", "JENKINS_URL")}
    environ |= {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD], env=environ, capture_output=True, text=True, timeout=100, check=True
    )
    assert (done.stdout, list(tmp_path.rglob("*"))) == ("", [])
