"""Tests of ``model.pt2`` that need a GPU: programs that move to it and from it, and packages compiled for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LoadError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch finds no GPU"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
X = np.random.default_rng(4).normal(size=(3, 8)).astype(np.float32)
CONFIG = (
    """input { name: "x" data_type: TYPE_FP32 dims: [3, 8] } output { name: "y" data_type: TYPE_FP32 dims: [3, 8] }"""
)


class Shifted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + torch.arange(8, device=x.device)
        return y


def expected() -> np.ndarray[Any, Any]:
    with torch.no_grad():
        found: np.ndarray[Any, Any] = Shifted()(torch.from_numpy(X)).numpy()
    return found


@pytest.mark.parametrize("made_on", ["cpu", "cuda"])
@pytest.mark.parametrize("served_on", ["cpu", "gpu"])
def test_a_program_runs_where_its_instance_is(programs: Any, made_on: str, served_on: str) -> None:
    programs.save(Shifted().to(made_on), torch.from_numpy(X).to(made_on))
    instance = programs.load(device=served_on)
    result = instance.execute({"x": X})["OUTPUT__0"]
    instance.execute({"x": X + 1})
    np.testing.assert_allclose(result, expected(), rtol=1e-3, atol=1e-3)


def test_a_package_for_the_gpu_runs_there_and_nowhere_else(programs: Any) -> None:
    """Not yet run with PyTorch's own loader. Headrace's loader crashed on an H100, with PyTorch 2.11."""
    path: Path = programs.root / "m" / "1" / "model.pt2"
    path.parent.mkdir(parents=True)
    program = torch.export.export(Shifted().cuda(), (torch.from_numpy(X).cuda(),))
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    with pytest.raises(LoadError, match="was compiled for 'cuda', and the instance runs on 'cpu'"):
        programs.load(CONFIG, trust=True)
    instance = programs.load(CONFIG, device="gpu", trust=True)
    result = instance.execute({"x": X})["y"]
    instance.execute({"x": X + 1})
    np.testing.assert_allclose(result, expected(), rtol=1e-3, atol=1e-3)
