"""An ensemble of three models of PyTorch, one of each kind of file, for a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.backends.torch.conftest import Modules, save_program, save_script

CONFIG = """max_batch_size: 8 instance_group {{ kind: {kind} }} dynamic_batching {{}}
input {{ name: "x" data_type: TYPE_FP32 dims: [4] }} output {{ name: "y" data_type: TYPE_FP32 dims: [4] }}
"""
#: What the three compute.
CHAIN: Callable[[Any], Any] = lambda x: (x * 2 + 1) ** 2  # noqa: E731

_ENSEMBLE = """platform: "ensemble" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [4] } output { name: "y" data_type: TYPE_FP32 dims: [4] }
ensemble_scheduling {
  step { model_name: "script" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } }
  step { model_name: "eager" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "y" value: "u" } }
  step { model_name: "program" model_version: -1 input_map { key: "x" value: "u" } output_map { key: "y" value: "y" } }
}"""
_EAGER = """
class Net(torch.nn.Module):
    def forward(self, x):
        return x + 1
"""


class Twice(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Squared(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


def write_chain(repository: Path, kind: str) -> None:
    """Write the models and the ensemble ``chain``: ``x`` and ``y`` f32[rows, 4], ``y`` is `CHAIN`."""
    config = CONFIG.format(kind=kind)
    save_script(Twice(), repository / "script/1/model.pt")
    (repository / "script/config.pbtxt").write_text(f'backend: "pytorch" {config}')
    Modules(repository).write(_EAGER, "eager", config)
    sizes = {"x": {0: torch.export.Dim("rows", min=1, max=8)}}
    save_program(Squared(), (torch.zeros(2, 4),), repository / "program/1/model.pt2", dynamic_shapes=sizes)
    (repository / "program/config.pbtxt").write_text(f'backend: "pytorch" {config}')
    (repository / "chain/1").mkdir(parents=True)
    (repository / "chain/config.pbtxt").write_text(_ENSEMBLE)
