"""Settings of the whole process: the mode of TorchScript, and the threads across operators."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headrace import ConfigError
from headrace.config.model_config_pb2 import ModelParameter
from headrace.config.parameters import parse_parameters
from headrace_torch import Parameters, torch_process

CONFIG = 'input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }'
SETTERS = {
    "enable_jit_executor": torch._C._jit_set_profiling_executor,
    "enable_jit_profiling": torch._C._jit_set_profiling_mode,
    "enable_tensor_fuser": torch._C._jit_set_texpr_fuser_enabled,
}


def value_of(name: str) -> bool:
    """Return the value that PyTorch has."""
    if name == "enable_tensor_fuser":
        return bool(torch._C._jit_texpr_fuser_enabled())
    value = bool(SETTERS[name](True))
    SETTERS[name](value)
    return value


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch_process, "_jit_chosen", {})
    before = {name: value_of(name) for name in SETTERS}
    yield
    for name, value in before.items():
        SETTERS[name](value)


@pytest.mark.parametrize("name", SETTERS)
@pytest.mark.parametrize("value", [True, False])
def test_the_first_model_sets_the_jit(scripts: Any, name: str, value: bool, caplog: pytest.LogCaptureFixture) -> None:
    scripts.load(torch.nn.ReLU(), CONFIG, **{name: value})
    assert value_of(name) is value
    scripts.load(None, CONFIG, **{name: value})
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "headrace.pytorch"):
        scripts.load(None, CONFIG, **{name: not value})
    assert value_of(name) is value
    assert f"model 'm': {name.upper()} stays {str(value).lower()}" in caplog.text


def test_settings_without_a_value_stay_unchanged(scripts: Any) -> None:
    for name, setter in SETTERS.items():
        for value in (True, False):
            setter(value)
            scripts.load(torch.nn.ReLU(), CONFIG)
            assert value_of(name) is value


def test_parameters_have_the_keys_of_triton() -> None:
    texts = {
        "ENABLE_JIT_EXECUTOR": "true",
        "ENABLE_TENSOR_FUSER": "false",
        "NUM_THREADS": "3",
        "NUM_INTEROP_THREADS": "2",
        "TORCH_COMPILE_OPTIONAL_PARAMETERS": "{}",
    }
    found = parse_parameters(Parameters, {key: ModelParameter(string_value=value) for key, value in texts.items()})
    assert (found.enable_jit_executor, found.enable_jit_profiling, found.enable_tensor_fuser) == (True, None, False)
    assert (found.threads_within, found.threads_across, found.torch_compile) == (3, 2, "{}")


@pytest.mark.parametrize("name", ["num_threads", "num_interop_threads"])
def test_a_number_of_threads_below_zero_is_refused(name: str) -> None:
    fields: dict[str, Any] = {name: -1}
    with pytest.raises(ConfigError, match=f"parameter '{name.upper()}' is -1, but a number of threads is 0 or more"):
        Parameters(**fields)
