"""A model's process has the title that scripts for Triton search for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from tests.conftest import Headrace

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""


def test_a_process_is_found_as_tritons_and_by_its_instance(serve: Callable[..., Headrace], tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(MODEL)
    (tmp_path / "m" / "config.pbtxt").write_text(
        'backend: "python" input { name: "x" data_type: TYPE_FP32 dims: [1] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [1] } instance_group { kind: KIND_CPU }'
    )
    server = serve(f"--model-repository={tmp_path}")
    found = [
        child
        for child in psutil.Process(server.process.pid).children(recursive=True)
        if child.name() == "triton_python_backend_stub"
    ]
    assert [child.cmdline()[:2] for child in found] == [["triton_python_backend_stub", "m_0_0"]]
    assert not any(child.environ().get("PYTHONHOME") for child in found)  # nothing beside it is overwritten
    found[0].kill()  # as Triton's own tests do
    server.wait_until_ready()
