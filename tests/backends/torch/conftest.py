"""Models made on the spot, and the backend driven as core drives it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
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


def load(path: Path, config: str, device: str = "cpu", is_sent: bool = False, **parameters: Any) -> Instance:
    """An instance of the version in ``path``, as core loads it; ``config`` names inputs and outputs."""
    parsed = text_format.Parse(config, ModelConfig())
    parsed.name, backend = "m", PyTorch({})
    where = Device("model" if device == "model" else "gpu" if device == "gpu" else "cpu")
    given = Parameters(**parameters)
    model = Model("m", 1, path, parsed, given, instance_name="m_0", device=where, is_sent=is_sent)
    backend.complete_config(model)
    return backend.load(replace(model, shared=backend.share(model)))


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
        return load(self.root / "m" / "1", config, device, **parameters)


class Modules:
    """Writes ``<root>/<name>/1/model.py``, and what lies beside it, and describes it to the backend."""

    CONFIG = 'backend: "pytorch" runtime: "model.py" '

    def __init__(self, root: Path) -> None:
        self.root = root
        self._open: list[Instance] = []

    def write(self, code: str, name: str = "m", config: str = "", **beside: str) -> Path:
        """``code`` follows ``import torch``. ``beside`` are further modules. Returns the version's directory."""
        folder = self.root / name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in {"model": code, **beside}.items():
            (folder / f"{file}.py").write_text(f"import torch\n{dedent(text)}")
        if config:
            (self.root / name / "config.pbtxt").write_text(f"{self.CONFIG} {config}")
        return folder

    def load(self, code: str | None, config: str, device: str = "cpu", is_sent: bool = False, **given: Any) -> Instance:
        """An instance of what is written now, or was."""
        if code is not None:
            self.write(code)
        instance = load(self.root / "m" / "1", f"{self.CONFIG} {config}", device, is_sent, **given)
        self._open.append(instance)
        return instance

    def close(self, instance: Instance) -> None:
        self._open.remove(instance)
        instance.close()

    def close_all(self) -> None:
        while self._open:
            self.close(self._open[-1])


@pytest.fixture
def scripts(tmp_path: Path) -> Scripts:
    return Scripts(tmp_path / "repository")


@pytest.fixture
def modules(tmp_path: Path) -> Iterator[Modules]:
    found = Modules(tmp_path / "repository")
    yield found
    found.close_all()


@pytest.fixture
def write_script() -> Callable[[torch.nn.Module, Path], Path]:
    return save_script


@pytest.fixture(scope="session", autouse=True)
def compiled_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled is kept for this run of the tests, and no longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def threads_of_this_test() -> Any:
    """What an instance sets for its thread is undone for the tests' own."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)
