"""A sound backend, and fixtures that install a changed copy of it and run the kit."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.plugins import Plugins
from headrace.registry import PluginInfo
from headrace_testing import BackendConformance, Example

#: A sound backend: ``y = scale * x`` in any float type, with the scale in ``scale.txt``.
SOUND = """
from __future__ import annotations
from dataclasses import dataclass
import os, threading
import numpy as np
from headrace import Backend, BackendError, Instance, LoadError, Model, RequestInstance
from headrace import InferResponse, Tensors, hookimpl

UNDO = []  # calls that clean up after a saboteur


@dataclass(frozen=True, slots=True)
class Parameters:
    offset: int = 0


class Toy(Backend):
    name = "toy"
    Parameters = Parameters
    instance_classes = (Instance,)

    def load(self, model: Model) -> Scaler:
        path = model.file("scale.txt")
        try:
            scale = float(path.read_text())
        except ValueError as error:
            raise LoadError(f"{path}: {error}") from error
        return Scaler(model, np.float32(scale))


class Scaler(Instance):
    any_thread = True

    def __init__(self, model: Model, scale: np.float32) -> None:
        self.model, self.scale = model, scale

    def execute(self, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        return {"y": (x * self.scale).astype(x.dtype)}


@hookimpl
def register_backends():
    return [Toy]
"""


@pytest.fixture
def add_part(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], Any]], None]:
    """Return a function that makes every server find a part of a kind, as if its distribution was installed."""

    def add(kind: str, part: Callable[[], Any]) -> None:
        discover = Plugins.discover

        def discover_with_part(*arguments: Any) -> Plugins:
            plugins = discover(*arguments)
            registry = getattr(plugins, kind)
            if part().name not in registry.names():
                registry.add(part(), PluginInfo(part().name, "tests", "0"))
            return plugins

        monkeypatch.setattr(Plugins, "discover", discover_with_part)

    return add


class ToyConformance(BackendConformance):
    """The kit for the backend ``toy`` of the module ``headrace_toy``."""

    plugin, backend, heavy = "headrace_toy", "toy", ("heavy_engine",)

    def example_of(self, kind: str, directory: Path) -> Example | None:
        dtype = {"FP16": np.float16, "FP64": np.float64, "SCALAR": np.float32}.get(kind)
        if dtype is None:
            return None
        (directory / "scale.txt").write_text("2.0")
        x = np.arange(3 if kind == "SCALAR" else 6).reshape(3, -1).astype(dtype)
        x = x[:, 0] if kind == "SCALAR" else x
        return Example(directory, {"x": x}, {"y": x + x})


@pytest.fixture
def sound() -> str:
    """Return the source of the sound backend."""
    return SOUND


@pytest.fixture
def conformance() -> ToyConformance:
    return ToyConformance()


@pytest.fixture
def example(tmp_path: Path) -> Example:
    """Return five rows, with answers by arithmetic."""
    files = tmp_path / "files"
    files.mkdir()
    (files / "scale.txt").write_text("2.0")
    x = np.arange(1, 21, dtype=np.float32).reshape(5, 4)
    return Example(files, {"x": x}, {"y": x + x}, damage="scale.txt")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Yield a function that installs ``source`` as the module ``headrace_toy``, with ``entry_points``."""

    def write(source: str, entry_points: str = "[headrace]\ntoy = headrace_toy\n") -> None:
        site = tmp_path / "site"
        info = site / "headrace_toy-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-toy\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        (site / "heavy_engine.py").write_text("")
        (site / "headrace_toy.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))

    yield write
    for undo in getattr(sys.modules.get("headrace_toy"), "UNDO", ()):
        undo()
    for name in ("headrace_toy", "heavy_engine"):
        sys.modules.pop(name, None)
