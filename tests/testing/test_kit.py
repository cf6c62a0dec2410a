"""The kit of backends as an author runs it: a sound backend passes, and the summary lists the skipped checks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_testing import BackendConformance, Example
from headrace_testing.serving import WAYS

AUTHORS_TEST = """
import numpy as np, pytest
from headrace_testing import BackendConformance, Example

class TestToy(BackendConformance):
    plugin, backend, heavy = "headrace_toy", "toy", ("heavy_engine",)

    @pytest.fixture
    def example(self, tmp_path):
        (tmp_path / "scale.txt").write_text("2.0")
        x = np.ones((3, 2), np.float32)
        return Example(tmp_path, {"x": x}, {"y": x + x}, damage="scale.txt")
"""


def run_authors_test(folder: Path) -> str:
    """Return the output of pytest on the author's test. Fail unless it passes."""
    (folder / "test_toy.py").write_text(AUTHORS_TEST)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_toy.py"]
    finished = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "failed" not in finished.stdout
    return finished.stdout


def test_the_sound_backend_passes_and_the_summary_lists_skipped_checks(
    sound: str, install: Callable[..., None], tmp_path: Path
) -> None:
    install(sound)
    output = run_authors_test(tmp_path)
    assert "conformance checks not run" in output
    assert "toy: FP16 is claimed but never exercised" in output


#: The scaler as a `DeferredInstance`: its own thread answers each call.
DEFERRED = """
class Scaler(DeferredInstance):
    def __init__(self, model: Model, scale: np.float32) -> None:
        self.scale = scale
        self.calls = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.answer)
        self.thread.start()

    def accept(self, calls) -> None:
        for call in calls:
            self.calls.put(call)

    def answer(self) -> None:
        while (call := self.calls.get()) is not None:
            try:
                x = call.request.inputs["x"]
                call.send(InferResponse({"y": (x * self.scale).astype(x.dtype)}))
            except Exception as error:
                call.send(BackendError(str(error)))

    def close(self) -> None:
        self.calls.put(None)
        self.thread.join()

"""


def test_a_sound_backend_that_answers_from_its_own_thread_passes(
    sound: str, install: Callable[..., None], tmp_path: Path
) -> None:
    before, _, rest = sound.partition("class Scaler(Instance):")
    after = rest[rest.index("@hookimpl") :]
    imports = "import queue\nfrom headrace import DeferredInstance\n"
    before = before.replace("import os, threading\n", f"import os, threading\n{imports}")
    install(
        before.replace("instance_classes = (Instance,)", "instance_classes = (DeferredInstance,)") + DEFERRED + after
    )
    run_authors_test(tmp_path)


def test_the_pytest_plugin_imports_no_engine_and_no_client() -> None:
    code = "import sys, headrace_testing.plugin; print(sorted(sys.modules))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    finished = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    for heavy in ("onnxruntime", "onnx", "tritonclient", "grpc", "hypercorn"):
        assert f"'{heavy}'" not in finished.stdout, f"{heavy} is imported at the start of every pytest run"


CONFIG = """
    name: "scaler" backend: "toy" max_batch_size: 4
    input { name: "x" data_type: TYPE_FP32 dims: 2 }
    output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""


@pytest.mark.parametrize("over", WAYS)
def test_the_fixtures_send_requests_over_every_frontend(
    over: str,
    sound: str,
    install: Callable[..., None],
    example: Example,
    write_model: Callable[..., Path],
    headrace_server: Callable[..., Any],
    infer: Callable[..., Any],
) -> None:
    install(sound)
    write_model(CONFIG, example.path)
    x = np.array([[1, 2], [3, 4]], np.float32)
    outputs = infer(headrace_server(), "scaler", {"x": x}, over=over)
    np.testing.assert_array_equal(outputs["y"], [[2, 4], [6, 8]])


def test_a_check_of_an_unclaimed_property_is_skipped(
    conformance: BackendConformance, sound: str, install: Callable[..., None], example: Example
) -> None:
    class NoZeroRows(type(conformance)):  # type: ignore[misc]
        zero_rows = False

    install(sound)
    with pytest.raises(pytest.skip.Exception, match="conformance: toy: zero rows are not claimed"):
        NoZeroRows().test_zero_rows_give_zero_rows(example)
