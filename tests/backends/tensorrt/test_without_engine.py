"""The error if TensorRT, the driver or the GPU is missing: one line, with the command if there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

COMMAND = "pip install tensorrt-cu13 (tensorrt-cu12 for a driver of CUDA 12)"
LOAD = """
import json, sys
from pathlib import Path
from headrace import Device, HeadraceError, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_tensorrt import Parameters, TensorRT
path = Path(sys.argv[1])
model = Model("m", 1, path, ModelConfig(name="m"), Parameters(), device=Device("gpu", int(sys.argv[2])))
errors = []
for step in (TensorRT({}).complete_config, TensorRT({}).load):
    try:
        step(model)
    except HeadraceError as error:
        errors.append([type(error).__name__, error.message])
print(json.dumps(errors))
"""


def errors_of(tmp_path: Path, environ: Mapping[str, str], gpu: int = 0) -> set[tuple[str, str]]:
    """Return the errors of a process with ``environ`` about a plan, when its config is completed and when it is
    loaded."""
    (tmp_path / "model.plan").write_bytes(b"a plan")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path), str(gpu)],
        capture_output=True, text=True, timeout=60, check=True, env={**os.environ, **environ},
    )  # fmt: skip
    return {(kind, message) for kind, message in json.loads(done.stdout)}


def hidden(tmp_path: Path, source: str) -> dict[str, str]:
    """An environment whose module ``tensorrt`` is ``source``."""
    (tmp_path / "tensorrt.py").write_text(source)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}


def test_without_tensorrt_the_error_has_the_install_command(tmp_path: Path) -> None:
    environ = hidden(tmp_path, "raise ModuleNotFoundError(\"No module named 'tensorrt'\")")
    assert errors_of(tmp_path, environ) == {
        (
            "LoadError",
            f"backend 'tensorrt' needs TensorRT, which cannot be imported (No module named 'tensorrt'); run: {COMMAND}",
        )
    }


def test_the_bindings_without_their_libraries_are_not_enough(tmp_path: Path) -> None:
    """The case that only tensorrt-cu13-bindings is installed."""
    if importlib.util.find_spec("tensorrt_bindings") is None:
        pytest.skip("tensorrt-cu13-bindings is not installed")
    ((kind, message),) = errors_of(tmp_path, hidden(tmp_path, "from tensorrt_bindings import *"))
    assert kind == "LoadError"
    assert "needs TensorRT, which cannot be imported (lib" in message
    assert message.endswith(f"run: {COMMAND}")


def test_an_old_tensorrt_is_refused(tmp_path: Path) -> None:
    ((_, message),) = errors_of(tmp_path, hidden(tmp_path, "__version__ = '8.6.1'"))
    assert message.startswith(
        "backend 'tensorrt' needs TensorRT 10 or later, not 8.6.1; run: pip install tensorrt-cu13"
    )


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a CUDA driver")
def test_without_a_driver_the_error_names_it(tmp_path: Path) -> None:
    ((_, message),) = errors_of(tmp_path, hidden(tmp_path, "__version__ = '11.4.0'"))
    assert message.startswith(
        "backend 'tensorrt' runs on NVIDIA GPUs only, and this machine has no CUDA driver (libcuda"
    )


@pytest.mark.parametrize(
    ("gpus", "gpu", "what"),
    [("2", 2, "there is no GPU 2: the CUDA driver knows 2"), ("0", 0, "the CUDA driver cannot be used: cuInit failed")],
)
def test_a_missing_gpu_is_refused(tmp_path: Path, standins: Path, gpus: str, gpu: int, what: str) -> None:
    environ = {
        "PYTHONPATH": os.pathsep.join([str(standins), os.environ.get("PYTHONPATH", "")]),
        "LD_LIBRARY_PATH": str(standins),
        "STANDIN_GPUS": gpus,
    }
    found = [message for _, message in errors_of(tmp_path, environ, gpu)]
    assert any(message.startswith(what) for message in found), found
