"""Executions before the first request: the models that have them, and that they have no visible effect."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace import Instance
from headrace_torch import warm_up

CONFIG = """max_batch_size: 16 input { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 3, -1 ] } """
ONE = {"x": np.ones((1, 3, 2), np.float32)}


class Halved(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) / 2


class Counts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x * self.calls


class Draws(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(1)


class NeverForZeros(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool(x.sum() < 1):
            x = x * 2
        return x


class OnlyTwo(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.size(2) != 2:
            raise ValueError("two columns, please")
        return x


def compiled(instance: Any) -> bool:
    """Return True if TorchScript has a plan for ``forward``. It makes the plan at an execution."""
    try:
        return bool(instance._run.owner.get_debug_state().execution_plans)
    except RuntimeError:  # the error without one
        return False


def shapes_of(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    execute = instance.execute

    def watched(inputs: Any) -> Any:
        found.append(inputs["x"].shape)
        return execute(inputs)

    monkeypatch.setattr(instance, "execute", watched)
    instance.warm_up()
    return found


def test_torchscript_has_compiled_before_the_first_request(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = scripts.load(Halved(), CONFIG)
    assert not compiled(instance)
    assert shapes_of(instance, monkeypatch) == [(1, 3, 8)] * 3 + [(8, 3, 8)]
    assert compiled(instance)
    np.testing.assert_allclose(instance.execute(ONE)["y"], np.tanh(ONE["x"]) / 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("most", "shapes"), [(0, [(3, 8)] * 3), (1, [(1, 3, 8)] * 3), (4, [(1, 3, 8)] * 3 + [(4, 3, 8)])]
)
def test_at_most_max_batch_size_rows_are_executed(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, most: int, shapes: list[tuple[int, ...]]
) -> None:
    instance = scripts.load(Halved(), CONFIG.replace("size: 16", f"size: {most}"))
    assert shapes_of(instance, monkeypatch) == shapes


def test_programs_are_executed_too(programs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.export.Dim("rows", min=1, max=6)
    programs.save(Halved(), torch.zeros(2, 3, 2), dynamic_shapes={"x": {0: rows}})
    assert shapes_of(programs.load(), monkeypatch) == [(1, 3, 2)] * 3 + [(4, 3, 2)], "4 rows unless said otherwise"


@pytest.mark.filterwarnings("ignore:The tensor attributes self._flat_weights")
def test_dropout_in_training_only_is_not_random(programs: Any) -> None:
    for module in (torch.nn.TransformerEncoderLayer(4, 2), torch.nn.LSTM(4, 4, dropout=0.5, num_layers=2)):
        programs.save(module.eval(), torch.zeros(2, 3, 4))
        assert programs.load()._can_warm_up, type(module)


@pytest.mark.parametrize("module", [Counts(), Draws(), NeverForZeros()])
def test_models_with_effects_are_skipped(
    scripts: Any, programs: Any, monkeypatch: pytest.MonkeyPatch, module: torch.nn.Module
) -> None:
    instances = [scripts.load(module, CONFIG)]
    if not isinstance(module, NeverForZeros):
        rows, columns = torch.export.Dim("rows", min=1, max=16), torch.export.Dim("columns", min=1, max=16)
        (scripts.root / "m" / "1" / "model.pt").unlink()
        programs.save(module, torch.zeros(2, 3, 4), dynamic_shapes={"x": {0: rows, 2: columns}})
        instances.append(programs.load(CONFIG.replace('"y"', '"OUTPUT__0"')))
    for instance in instances:
        before = torch.random.get_rng_state()
        assert not shapes_of(instance, monkeypatch)
        assert torch.equal(torch.random.get_rng_state(), before)
    if isinstance(module, Counts):
        assert [next(iter(each.execute(ONE).values()))[0, 0, 0] for each in instances] == [1, 1]


def test_code_of_the_user_is_left_alone(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = modules.load("class M(torch.nn.Module):\n    def forward(self, x):\n        return x", CONFIG)
    assert not shapes_of(instance, monkeypatch)


@pytest.mark.parametrize("config", [CONFIG, CONFIG + 'model_warmup { name: "mine" batch_size: 1 }'])
def test_the_config_can_turn_the_warm_up_off(scripts: Any, monkeypatch: pytest.MonkeyPatch, config: str) -> None:
    instance = scripts.load(Halved(), config, warm_up=config is not CONFIG)
    assert not shapes_of(instance, monkeypatch)


def test_a_model_that_fails_for_zeros_is_served(scripts: Any, caplog: pytest.LogCaptureFixture) -> None:
    instance = scripts.load(OnlyTwo(), CONFIG)
    with caplog.at_level(logging.INFO, "headrace.pytorch"):
        instance.warm_up()
    assert "model 'm' fails for zeros, so the first requests may be slow: PyTorch execute failure: " in caplog.text
    np.testing.assert_array_equal(instance.execute(ONE)["y"], ONE["x"])


def test_a_slow_model_is_not_loaded_for_ever(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr(warm_up, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    instance = scripts.load(Halved(), CONFIG)
    execute = instance.execute

    def slowly(inputs: Any) -> Any:
        now_s[0] += warm_up._LONGEST_S + 1
        return execute(inputs)

    monkeypatch.setattr(instance, "execute", slowly)
    assert len(shapes_of(instance, monkeypatch)) == 1
