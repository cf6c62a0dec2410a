"""Models made on the spot, and the backend driven as core drives it."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import text_format

from headrace import Device, Instance, Model
from headrace.config.derive import derive
from headrace.config.model_config_pb2 import ModelConfig
from headrace.storage.local_storage import files_below
from headrace_torch import Parameters, PyTorch

#: A module of ``x`` f32[..., 4] for a ``model.py``, and the weights that make it multiply with them.
SCALE = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.scale
"""
SCALES = np.array([1, 2, 3, 4], np.float32)


def save_script(module: torch.nn.Module, path: Path) -> Path:
    """``module`` as TorchScript in the file ``path``; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module.eval()).save(str(path))  # type: ignore[no-untyped-call]
    return path


def load(path: Path, config: str, device: str = "cpu", is_sent: bool = False, **parameters: Any) -> Instance:
    """Return an instance of the version in ``path``, as core loads it; ``config`` names inputs and outputs."""
    parsed = text_format.Parse(config, ModelConfig())
    parsed.name, backend = "m", PyTorch({})
    where = Device("model" if device == "model" else "gpu" if device == "gpu" else "cpu")
    chosen = Parameters(**parameters)
    model = Model("m", 1, path, parsed, chosen, instance_name="m_0", device=where, is_sent=is_sent)
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
        """Save ``module`` unless it is None. Return an instance of the file; ``config`` names inputs and outputs."""
        if module is not None:
            self.save(module)
        return load(self.root / "m" / "1", config, device, **parameters)


class Modules:
    """Writes ``<root>/<name>/1/model.py`` and the files beside it, and loads it."""

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

    def load(
        self, code: str | None, config: str, device: str = "cpu", is_sent: bool = False, **parameters: Any
    ) -> Instance:
        """Write ``code``, unless it is None, and return an instance of the file."""
        if code is not None:
            self.write(code)
        instance = load(self.root / "m" / "1", f"{self.CONFIG} {config}", device, is_sent, **parameters)
        self._open.append(instance)
        return instance

    def close(self, instance: Instance) -> None:
        self._open.remove(instance)
        instance.close()

    def close_all(self) -> None:
        while self._open:
            self.close(self._open[-1])


def save_program(
    module: torch.nn.Module,
    arguments: tuple[Any, ...],
    path: Path,
    named: dict[str, Any] | None = None,
    dynamic_shapes: Any = None,
) -> Path:
    """``module`` as a program of torch.export in the file ``path``; its directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    program = torch.export.export(module.eval(), arguments, named, dynamic_shapes=dynamic_shapes)
    torch.export.save(program, str(path))
    return path


class Programs:
    """Writes ``<root>/<name>/1/model.pt2`` and loads it as a server does, with a completed config."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = ModelConfig()

    def save(
        self,
        module: torch.nn.Module,
        *arguments: Any,
        name: str = "m",
        named: dict[str, Any] | None = None,
        dynamic_shapes: Any = None,
    ) -> Path:
        return save_program(module, arguments, self.root / name / "1" / "model.pt2", named, dynamic_shapes)

    def load(
        self, config: str = "", device: str = "cpu", name: str = "m", is_sent: bool = False, **parameters: Any
    ) -> Instance:
        """Return an instance; `config` is then the completed config."""
        self.config = text_format.Parse(config, ModelConfig())
        self.config.name = name
        derive(self.config, name, files_below(self.root / name))
        backend, where = PyTorch({}), Device("gpu" if device == "gpu" else "cpu")
        path = self.root / name / "1"
        chosen = Parameters(**parameters)
        model = Model(name, 1, path, self.config, chosen, instance_name=f"{name}_0", device=where, is_sent=is_sent)
        backend.complete_config(model)
        return backend.load(replace(model, shared=backend.share(model)))


def rewrite_archive(path: Path, changes: Mapping[str, Any]) -> None:
    """Change the zip file ``path``. ``changes`` says of the end of a name what the content becomes: a function of it,
    or other content. A name that is new is put into the folder of the others."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    folder = next(iter(content)).partition("/")[0]
    for end, change in changes.items():
        names = [name for name in content if name.endswith(end)] or [f"{folder}/{end}"]
        for name in names:
            content[name] = change(content[name]) if callable(change) else change
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data)


@pytest.fixture
def rewrite() -> Callable[[Path, Mapping[str, Any]], None]:
    return rewrite_archive


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    return Programs(tmp_path / "repository")


@pytest.fixture
def write_program() -> Callable[..., Path]:
    return save_program


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
    """Keep compiled code for this run of the tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADRACE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def threads_of_this_test() -> Any:
    """Restore the thread settings that an instance changes."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)
