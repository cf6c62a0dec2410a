"""The published kit for modules in a ``model.py``, plain and compiled, with arithmetic as the oracle."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace_testing import BackendConformance, Example, extreme_values

RUNTIME = 'runtime: "model.py"'
AFFINE = """
import torch

class Affine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(16))

    def forward(self, a, b):
        return a * self.scale + b, a - b
"""
SAME = """
import torch

class Same(torch.nn.Module):
    def forward(self, x):
        return x if isinstance(x, list) else x.clone()
"""


class TestEagerPyTorch(BackendConformance):
    plugin, backend, heavy = "headrace_torch", "pytorch", ("torch", "safetensors")

    @pytest.fixture
    def example(self, tmp_path: Path) -> Example:
        return self._affine(tmp_path / "files", {})

    def _affine(self, folder: Path, parameters: dict[str, str]) -> Example:
        a, b = np.random.default_rng(7).normal(size=(2, 5, 16)).astype(np.float32)
        folder.mkdir()
        (folder / "model.py").write_text(AFFINE)
        scale = np.arange(16, dtype=np.float32)
        torch.save({"scale": torch.from_numpy(scale)}, folder / "model.pt")
        outputs = {"s__0": a * scale + b, "d__1": a - b}
        return Example(folder, {"a": a, "b": b}, outputs, parameters, damage="model.pt", config=RUNTIME)

    def example_of(self, kind: str, directory: Path) -> Example | None:
        (directory / "model.py").write_text(SAME)
        x = np.array(["", "naïve", "a\0b 🚰"], object) if kind == "BYTES" else extreme_values(kind)
        return Example(directory, {"x": x}, {"y": x}, config=RUNTIME)


class TestCompiledPyTorch(TestEagerPyTorch):
    """With a compiler of PyTorch's that needs none of the machine's: what surrounds it is the same.

    PyTorch keeps half a megabyte of every module that it has compiled: without Headrace it does so, too, whatever it is
    asked to forget. So this bound is that of 40 reloads with it."""

    reload_growth_bytes = 32 << 20

    @pytest.fixture
    def example(self, tmp_path: Path) -> Example:
        options = {"TORCH_COMPILE_OPTIONAL_PARAMETERS": '{"backend": "aot_eager"}'}
        return self._affine(tmp_path / "files", options)

    def example_of(self, kind: str, directory: Path) -> Example | None:
        return None  # as they are: the types are the converter's matter

    def test_fifty_reloads_keep_memory_files_and_threads_flat(self, example: Example) -> None:
        if os.environ.get("CI") == "true":
            pytest.skip("it compiles 50 times: 12 s of CPU")
        super().test_fifty_reloads_keep_memory_files_and_threads_flat(example)
