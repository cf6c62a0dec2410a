"""Side effects of TorchScript modules, read from their files, compared with those of an execution."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_torch.script_effects import ScriptEffects, effects_of

NONE = ScriptEffects(writes=False, changes=False, is_random=False, loops=False, repeats=False)


class Net(torch.nn.Module):
    """Batches are counted, and values dropped out, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.relu, self.dropout = torch.nn.ReLU(inplace=True), torch.nn.Dropout(0.5)
        self.recurrent = torch.nn.LSTM(4, 3, num_layers=2, dropout=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.dropout(self.relu(self.norm(self.convolution(x)))).mean([2, 3])
        for i in range(3):
            y = y + i
        y = self.recurrent(y)[0]
        return torch.relu(y)


class WithBuffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor
        self.register_buffer("seen", torch.zeros(8))


class ThroughView(WithBuffer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen[1:].add_(1)
        return x + self.seen.sum()


class Within(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = ThroughView()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x)  # type: ignore[no-any-return]


class OnCondition(WithBuffer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.sum() > 0):
            self.seen.zero_()
        return x + self.seen[0]


class Assigned(WithBuffer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        return x + self.seen[0]


class Number(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


class Listed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen = [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(2)
        return x + len(self.seen)


class IntoInput(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1).add_(1)


class Draws(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5)


class Until(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool(x.sum() < 1):
            x = x * 2
        return x


class AsOften(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x[0])):
            x = x * 2
        return x


class Often(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 << 40):
            x = x * 2
        return x


def opened(module: torch.nn.Module, path: Path, write_script: Callable[[torch.nn.Module, Path], Path]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.load(str(write_script(module, path / "model.pt"))).eval()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("kind", [ThroughView, Within, OnCondition, Assigned, Number, Listed])
def test_all_changes_of_a_modules_state_are_found(
    kind: type[torch.nn.Module], tmp_path: Path, write_script: Any
) -> None:
    assert effects_of(torch, opened(kind(), tmp_path, write_script)).changes


@pytest.mark.parametrize("module", [Net(), torch.nn.Linear(2, 2), torch.nn.TransformerEncoderLayer(4, 2)])
def test_a_network_in_evaluation_has_no_effects(module: torch.nn.Module, tmp_path: Path, write_script: Any) -> None:
    found = opened(module, tmp_path, write_script)
    assert effects_of(torch, found) == NONE
    before = {name: value.clone() for name, value in found.state_dict().items()}
    state = torch.random.get_rng_state()
    if isinstance(module, Net):
        for _ in range(3):
            found(torch.rand(2, 3, 5, 5, generator=torch.Generator()))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "does"),
    [
        (IntoInput, {"writes": True}),
        (Draws, {"is_random": True}),
        (Until, {"loops": True, "repeats": True}),
        (AsOften, {"repeats": True}),
        (Often, {"repeats": True}),
    ],
)
def test_each_effect_is_found(
    kind: type[torch.nn.Module], does: dict[str, bool], tmp_path: Path, write_script: Any
) -> None:
    found = effects_of(torch, opened(kind(), tmp_path, write_script))
    assert found == replace(NONE, **does)


@pytest.mark.parametrize(("module", "anywhere"), [(torch.nn.ReLU(), True), (Until(), False), (AsOften(), False)])
def test_a_model_that_may_never_end_does_not_run_on_the_event_loop(
    scripts: Any, module: torch.nn.Module, anywhere: bool
) -> None:
    config = (
        """input { name: "x" data_type: TYPE_FP32 dims: [2] } output { name: "y" data_type: TYPE_FP32 dims: [2] }"""
    )
    assert scripts.load(module, config).any_thread == anywhere


def test_an_unknown_module_has_all_effects() -> None:
    assert effects_of(torch, object()) == ScriptEffects(True, True, True, True, True)
