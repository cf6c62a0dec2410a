"""Tests that need a GPU: TorchScript and modules of a ``model.py``, each instance on a CUDA stream of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.backends.torch.conftest import SCALE, SCALES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch finds no GPU"),
]

CONFIG = 'input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] } '
ON_GPU = SCALE.replace("        return", "        assert x.is_cuda and self.scale.is_cuda\n        return")
STREAM = """
class Net(torch.nn.Module):
    def forward(self, x):
        return torch.tensor([torch.cuda.current_stream().cuda_stream], device=x.device)
"""
X = np.arange(4, dtype=np.float32)


def test_weights_and_inputs_are_on_the_gpu(modules: Any) -> None:
    torch.save({"scale": torch.from_numpy(SCALES)}, modules.write(ON_GPU) / "model.pt")
    for compiled in ("", "{}"):
        instance = modules.load(None, CONFIG, device="gpu", torch_compile=compiled)
        result = instance.execute({"x": X})["y"]
        instance.execute({"x": X + 1})
        np.testing.assert_array_equal(result, X * SCALES)


def test_a_model_that_puts_itself_on_the_gpu_gets_its_inputs_there(modules: Any) -> None:
    code = ON_GPU.replace("torch.zeros(4)", "torch.ones(4, device='cuda')")
    np.testing.assert_array_equal(modules.load(code, CONFIG, device="model").execute({"x": X})["y"], X)


def test_each_instance_has_a_stream_of_its_own(modules: Any) -> None:
    config = CONFIG.replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_INT64')
    streams = {int(np.asarray(modules.load(STREAM, config, device="gpu").execute({"x": X})["y"])[0]) for _ in range(3)}
    assert len(streams) == 3
    assert 0 not in streams


def test_torchscript_on_the_gpu_computes_the_same(scripts: Any) -> None:
    found = scripts.load(torch.nn.ReLU(), CONFIG, device="gpu").execute({"x": X - 2})["y"]
    np.testing.assert_array_equal(found, np.maximum(X - 2, 0))


def test_memory_that_runs_out_fails_one_request_and_the_next_succeeds(modules: Any) -> None:
    code = """
    class Net(torch.nn.Module):
        def forward(self, x):
            return x if x[0] == 0 else x + torch.ones(1 << 45, device=x.device).sum()
    """
    instance = modules.load(code, CONFIG, device="gpu")
    with pytest.raises(Exception, match="out of memory"):
        instance.execute({"x": X + 1})
    np.testing.assert_array_equal(instance.execute({"x": X})["y"], X)
