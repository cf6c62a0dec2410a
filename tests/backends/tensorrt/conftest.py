"""Plans of the recorded fake, the stand-in for the CUDA driver, and the backend driven as core drives it.

No GPU, no TensorRT: what is tested is everything around them. test_gpu.py asks the real ones, where they are.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from headrace import Device, Instance, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace.executors import devices
from headrace_tensorrt import Parameters, TensorRT

HERE = Path(__file__).parent
_COUNTS = ("pinned_count", "copies_in", "copies_out", "graph_launches", "live_objects", "begun")


def _build(into: Path) -> None:
    """``libcuda.so.1`` and ``libnvidia-ml.so.1`` of the stand-in."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        if os.environ.get("CI"):
            pytest.fail("no C compiler for the stand-in of the CUDA driver")
        pytest.skip("no C compiler for the stand-in of the CUDA driver")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        target = [f"-Wl,-soname,{name}", "-o", str(into / name)]
        subprocess.run(
            [compiler, "-Wall", "-Werror", "-shared", "-fPIC", str(HERE / "standin_cuda.c"), *target, "-lpthread"],
            check=True, timeout=120,
        )  # fmt: skip


@pytest.fixture(scope="session")
def standins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stand-ins' libraries, and the fake as a module ``tensorrt``."""
    folder = tmp_path_factory.mktemp("standins")
    _build(folder)
    shutil.copy(HERE / "recorded_tensorrt.py", folder / "tensorrt.py")
    return folder


class StandinDriver:
    """The stand-in for the CUDA driver of this process, and what it has counted."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        for name in _COUNTS:
            getattr(library, f"standin_{name}").restype = ctypes.c_size_t
        library.standin_used_bytes.restype = ctypes.c_size_t

    def __getattr__(self, name: str) -> int:
        return int(getattr(self._library, f"standin_{name}")())

    def used_bytes(self, gpu: int) -> int:
        return int(self._library.standin_used_bytes(gpu))

    def break_next_wait(self, code: int) -> None:
        self._library.standin_break_next_wait(code)

    def mend(self) -> None:
        self._library.standin_mend()


@pytest.fixture(scope="session")
def driver(standins: Path) -> StandinDriver:
    """In the place of the driver for all of this process: a library is known by its own name once it is loaded."""
    return StandinDriver(ctypes.CDLL(str(standins / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL))


@pytest.fixture(scope="session")
def recorded(driver: StandinDriver) -> Iterator[ModuleType]:
    """The fake, imported as ``tensorrt``."""
    spec = importlib.util.spec_from_file_location("tensorrt", HERE / "recorded_tensorrt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tensorrt"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["tensorrt"]


@pytest.fixture
def calls(recorded: ModuleType) -> list[tuple[str, tuple[Any, ...]]]:
    """Record the calls to TensorRT from now on."""
    recorded.CALLS.clear()
    found: list[tuple[str, tuple[Any, ...]]] = recorded.CALLS
    return found


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, recorded: ModuleType) -> None:
    """Show the two GPUs of the stand-in to the servers of this process."""
    for module in (devices, sys.modules["headrace.models.configuring"]):
        monkeypatch.setattr(module, "available_gpus", lambda: (0, 1))


class Plans:
    """Writes ``<root>/<name>/<version>/model.plan`` for the recorded fake, and describes it to the backend."""

    def __init__(self, root: Path, recorded: ModuleType) -> None:
        self.root, self._magic = root, recorded.MAGIC

    def write(
        self,
        inputs: Mapping[str, tuple[str, Sequence[int]]],
        outputs: Mapping[str, tuple[str, Sequence[int]]],
        compute: Sequence[Mapping[str, Any]],
        profiles: Sequence[Mapping[str, Any]] = (),
        name: str = "m",
        file: str = "model.plan",
        tensors: Mapping[str, Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> Path:
        """The version's directory. ``tensors`` says more of some inputs and outputs."""
        described = [
            {"name": key, "mode": mode, "type": element, "shape": list(shape), **(tensors or {}).get(key, {})}
            for mode, group in (("input", inputs), ("output", outputs))
            for key, (element, shape) in group.items()
        ]
        plan = {"tensors": described, "compute": list(compute), "profiles": list(profiles), **more}
        directory = self.root / name / "1"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / file).write_bytes(self._magic + json.dumps(plan).encode())
        return directory

    def add(self, name: str = "m", most: int = 8, **more: Any) -> Path:
        """``S = A + B`` and ``D = A - B`` for f32[rows, 16], up to ``most`` rows."""
        io = ("FLOAT", (-1, 16))
        profile = {each: [[1, 16], [min(4, most), 16], [most, 16]] for each in "AB"}
        compute = [step("add", "AB", "S"), step("sub", "AB", "D")]
        return self.write({"A": io, "B": io}, {"S": io, "D": io}, compute, [profile], name=name, **more)

    def copy(self, element: str = "FLOAT", shape: Sequence[int] = (-1, 4), **more: Any) -> Path:
        """``y = x``, of up to 8 of every variable dim."""
        sizes = [[low if dim < 0 else dim for dim in shape] for low in (1, 4, 8)]
        io = (element, shape)
        profiles = more.pop("profiles", [{"x": sizes}])
        return self.write({"x": io}, {"y": io}, [step("copy", "x", "y")], profiles, **more)

    def model(self, path: Path, config: str = "", parameters: Parameters | None = None, **fields: Any) -> Model:
        """Return the `Model` that core would create for the version at ``path``."""
        parsed = text_format.Parse(config, ModelConfig())
        parsed.name = path.parent.name
        for field in ("input_pinned_memory", "output_pinned_memory"):
            if not parsed.optimization.HasField(field):
                getattr(parsed.optimization, field).enable = True
        for index, group in enumerate(parsed.instance_group):
            group.name = group.name or f"m_{index}"
        return Model(path.parent.name, int(path.name), path, parsed, parameters or Parameters(), **fields)

    def serve(
        self,
        path: Path,
        config: str = "",
        parameters: Parameters | None = None,
        backend: TensorRT | None = None,
        gpu: int = 0,
    ) -> Instance:
        """An instance with a completed config, loaded and warm."""
        backend = backend or TensorRT({})
        model = self.model(path, config, parameters, device=Device("gpu", gpu), instance_name="m_0_0")
        backend.complete_config(model)
        instance = backend.load(replace(model, shared=backend.share(model)))
        assert isinstance(instance, Instance)
        instance.warm_up()
        return instance


def step(operation: str, inputs: Sequence[str], output: str, **more: Any) -> dict[str, Any]:
    """One step of a recorded plan's computation."""
    return {"op": operation, "inputs": list(inputs), "output": output, **more}


@pytest.fixture(name="step")
def _step() -> Callable[..., dict[str, Any]]:
    return step


@pytest.fixture
def plans(tmp_path: Path, recorded: ModuleType) -> Plans:
    return Plans(tmp_path / "repository", recorded)


@pytest.fixture
def pair() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two f32[3, 16]."""
    rng = np.random.default_rng(11)
    return rng.normal(size=(3, 16)).astype(np.float32), rng.normal(size=(3, 16)).astype(np.float32)
