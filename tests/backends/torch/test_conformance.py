"""The published kit, with arithmetic as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace_testing import BackendConformance, Example, extreme_values


class SumAndDifference(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class SameTensor(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class SameStrings(torch.nn.Module):
    def forward(self, x: list[str]) -> list[str]:
        return x


class TestPyTorch(BackendConformance):
    plugin, backend, heavy = "headrace_torch", "pytorch", ("torch",)

    @pytest.fixture
    def example(self, write_script: Any, tmp_path: Path) -> Example:
        a, b = np.random.default_rng(7).normal(size=(2, 5, 16)).astype(np.float32)
        write_script(SumAndDifference(), tmp_path / "files" / "model.pt")
        return Example(tmp_path / "files", {"a": a, "b": b}, {"s__0": a + b, "d__1": a - b}, damage="model.pt")

    @pytest.fixture(autouse=True)
    def _writer(self, write_script: Any) -> None:
        self.write = write_script

    def example_of(self, kind: str, directory: Path) -> Example | None:
        self.write(SameStrings() if kind == "BYTES" else SameTensor(), directory / "model.pt")
        # strings are a list in TorchScript, one per row
        x = np.array(["", "naïve", "a\0b 🚰"], object) if kind == "BYTES" else extreme_values(kind)
        return Example(directory, {"x": x}, {"y": x})
