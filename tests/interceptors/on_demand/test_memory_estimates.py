"""Estimates of memory before a measurement: by arithmetic, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace import LoadableModel, LoadError, ModelConfig
from headrace_on_demand.memory_budget import MemoryBudget
from headrace_on_demand.memory_estimates import MemoryEstimates
from headrace_on_demand.model_state import ModelState
from headrace_on_demand.on_demand_options import ModelSettings

MIB = 1 << 20


def wanted(*names: str, size: int = 0, **config: Any) -> Mapping[str, tuple[LoadableModel, ModelState]]:
    made = {}
    for name in names:
        model = LoadableModel(name, ModelConfig(name=name, **{"backend": "python", **config}), size * MIB, ())
        state = ModelState(name, lambda: None)
        state.read_config(model, ModelSettings())
        made[name] = model, state
    return made


def mib(charges: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
    return {name: round(charge["host"] / MIB, 1) for name, charge in charges.items()}


def test_a_model_in_a_process_is_estimated_by_the_largest_of_its_backend() -> None:
    estimates = MemoryEstimates(MemoryBudget({"host": 400 * MIB}))
    models = wanted("a", "b", size=1)
    assert mib(estimates.of("a", models, {})) == {"a": 49, "b": 49}
    assert estimates.unmeasured(model for model, _ in models.values()) == {"python"}
    for size in (131, 100):
        models["a"][1].process_bytes = size * MIB
        estimates.record(models["a"][1])
    assert mib(estimates.of("a", models, {})) == {"a": 131, "b": 131}
    assert estimates.unmeasured(model for model, _ in models.values()) == set()


def test_a_guess_above_the_budget_is_reduced_to_the_rest_of_it() -> None:
    estimates = MemoryEstimates(MemoryBudget({"host": 400 * MIB}))
    models = wanted("a", size=200, backend="onnxruntime")
    assert mib(estimates.of("a", models, {})) == {"a": 400}
    assert mib(estimates.of("a", models, {"pinned": {"host": 150 * MIB}})) == {"a": 250}
    assert mib(estimates.of("a", wanted("a", "b", size=100), {})) == {"a": 200, "b": 200}
    assert mib(MemoryEstimates(MemoryBudget({})).of("a", models, {})) == {"a": 700}


def test_the_least_need_is_refused_beside_pinned_models() -> None:
    estimates = MemoryEstimates(MemoryBudget({"host": 400 * MIB}))
    models = wanted("a", size=300, backend="onnxruntime")
    with pytest.raises(LoadError, match=r"300 MiB on host beside the pinned models \(p: 101 MiB\), and all models "):
        estimates.of("a", models, {"p": {"host": 101 * MIB}})
    assert mib(estimates.of("a", models, {"p": {"host": 100 * MIB}})) == {"a": 300}


def test_a_gpu_is_charged_for_models_with_instances_there() -> None:
    estimates = MemoryEstimates(MemoryBudget({"gpu 0": 10 * MIB, "gpu 1": 10 * MIB}))
    groups = [{"kind": "KIND_GPU", "gpus": [1]}]
    (charge,) = estimates.of("a", wanted("a", size=8, instance_group=groups), {}).values()
    assert {device: size // MIB for device, size in charge.items() if device != "host"} == {"gpu 1": 8}
    with pytest.raises(LoadError, match=r"11 MiB on gpu 0, and .* 10 MiB \(--on-demand-gpu-memory\)"):
        estimates.of("a", wanted("a", size=11, instance_group=[{"kind": "KIND_GPU"}]), {})
