"""The published kit on programs of torch.export, with arithmetic as the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace_testing import BackendConformance, Example, extreme_values


class Both(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b, a - b


class Copied(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.clone()


class TestExportedPrograms(BackendConformance):
    plugin, backend, heavy = "headrace_torch", "pytorch", ("torch",)

    @pytest.fixture
    def example(self, write_program: Any, tmp_path: Path) -> Example:
        a, b = np.random.default_rng(7).normal(size=(2, 5, 16)).astype(np.float32)
        rows = torch.export.Dim("rows", min=0, max=64)
        arguments = (torch.from_numpy(a), torch.from_numpy(b))
        write_program(Both(), arguments, tmp_path / "files" / "model.pt2", dynamic_shapes=({0: rows}, {0: rows}))
        return Example(
            tmp_path / "files",
            {"a": a, "b": b},
            {"OUTPUT__0": a + b, "OUTPUT__1": a - b},
            damage="model.pt2",
            config='default_model_filename: "model.pt2"',
        )

    @pytest.fixture(autouse=True)
    def _writer(self, write_program: Any) -> None:
        self.write = write_program

    def example_of(self, kind: str, directory: Path) -> Example | None:
        if kind == "BYTES":
            return None  # a program has tensors only; TorchScript has the strings
        x = extreme_values(kind)
        wire = x.view(np.int16) if kind == "BF16" else x
        tensor = torch.from_numpy(wire)
        tensor = tensor.view(torch.bfloat16) if kind == "BF16" else tensor
        rows = torch.export.Dim("rows", min=0, max=64)
        self.write(Copied(), (tensor,), directory / "model.pt2", dynamic_shapes=({0: rows},))
        return Example(directory, {"x": x}, {"y": x}, config='default_model_filename: "model.pt2"')
