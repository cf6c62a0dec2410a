"""TorchScript made on the spot, and the backend driven as core drives it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import text_format

from headrace import Device, Instance, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_torch import Parameters, PyTorch


def save_script(module: torch.nn.Module, path: Path) -> Path:
    """``module`` as TorchScript in the file ``path``; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module.eval()).save(str(path))  # type: ignore[no-untyped-call]
    return path


class Scripts:
    """Writes ``<root>/<name>/1/model.pt`` and describes it to the backend."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def save(self, module: torch.nn.Module, name: str = "m", config: str = "") -> Path:
        path = save_script(module, self.root / name / "1" / "model.pt")
        if config:
            (self.root / name / "config.pbtxt").write_text(config)
        return path

    def load(self, module: torch.nn.Module | None, config: str, device: str = "cpu", **parameters: Any) -> Instance:
        """An instance of what is saved now, or was; ``config`` names inputs and outputs."""
        if module is not None:
            self.save(module)
        parsed = text_format.Parse(config, ModelConfig())
        parsed.name, backend = "m", PyTorch({})
        where = Device("gpu" if device == "gpu" else "cpu")
        path = self.root / "m" / "1"
        model = Model("m", 1, path, parsed, Parameters(**parameters), instance_name="m_0", device=where)
        backend.complete_config(model)
        return backend.load(replace(model, shared=backend.share(model)))


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path / "repository")


@pytest.fixture
def write_script() -> Callable[[torch.nn.Module, Path], Path]:
    return save_script


@pytest.fixture(autouse=True)
def threads_of_this_test() -> Any:
    """What an instance sets for its thread is undone for the tests' own."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)
