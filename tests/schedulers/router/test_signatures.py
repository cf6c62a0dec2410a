"""The inputs and outputs of a router, and targets that do not fit together."""

from __future__ import annotations

import pytest

from headrace import ConfigError, Dependency, ModelConfig
from headrace_router.router_scheduler import RouterScheduler

from .conftest import config, identity, router, tensors
from .simulator import other

A, B = Dependency("a"), Dependency("b")
OPTIONAL = 'input { name: "z" data_type: TYPE_INT32 dims: [1] optional: true }'
RESHAPED = (
    'backend: "identity" max_batch_size: 4 '
    'input { name: "x" data_type: TYPE_FP32 dims: [6] reshape { shape: [2, 3] } } '
    'output { name: "y" data_type: TYPE_FP32 dims: [6] reshape { shape: [2, 3] } label_filename: "labels" }'
)


def completed(text: str, **models: str) -> ModelConfig:
    completed_config = config(text)
    RouterScheduler.complete_config(
        completed_config, {Dependency(name): other(each, name) for name, each in models.items()}
    )
    return completed_config


def test_a_router_has_the_tensors_of_its_baseline() -> None:
    completed_config = completed(router("a = 1, b = 1"), a=identity(8), b=identity(4, more=OPTIONAL))
    assert [(each.name, list(each.dims)) for each in completed_config.input] == [("x", [-1])]
    assert [each.name for each in completed_config.output] == ["y"]
    assert completed_config.max_batch_size == 4, "what every target takes"
    assert not completed_config.model_transaction_policy.decoupled


def test_the_target_reshapes_and_has_the_label_file() -> None:
    completed_config = completed(router("a = 1"), a=RESHAPED)
    assert (list(completed_config.input[0].dims), completed_config.input[0].HasField("reshape")) == ([6], False)
    assert (list(completed_config.output[0].dims), completed_config.output[0].HasField("reshape")) == ([6], False)
    assert completed_config.output[0].label_filename == ""


def test_tensors_in_the_config_are_checked() -> None:
    completed_config = completed(router("a = 1", "max_batch_size: 2 " + tensors()), a=identity())
    assert (len(completed_config.input), len(completed_config.output), completed_config.max_batch_size) == (1, 1, 2)
    fewer = 'output { name: "y" data_type: TYPE_FP32 dims: [-1] }'
    both = identity() + 'output { name: "more" data_type: TYPE_FP32 dims: [-1] }'
    assert [each.name for each in completed(router("a = 1", fewer), a=both).output] == ["y"]


@pytest.mark.parametrize(
    ("more", "field", "why"),
    [
        (
            'input { name: "x" data_type: TYPE_INT32 dims: [-1] }',
            "input[0]",
            "input 'x' is TYPE_INT32 [-1], and target 'a' has TYPE_FP32 [-1]; leave out input to have that of",
        ),
        ('input { name: "q" data_type: TYPE_FP32 dims: [-1] }', "input[0]", "and target 'a' has none of this name"),
        (
            'output { name: "y" data_type: TYPE_FP32 dims: [2] }',
            "output[0]",
            "output 'y' is TYPE_FP32 [2], and target 'a' has TYPE_FP32 [-1]",
        ),
        ("max_batch_size: 9 ", "max_batch_size", "allows maximum batch size 9, but its targets allow 8"),
    ],
)
def test_a_config_that_contradicts_the_targets_is_refused(more: str, field: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        completed(router("a = 1", more), a=identity())
    assert caught.value.message.startswith("router 'r'")
    assert why in caught.value.message
    assert caught.value.field == field


def test_a_missing_optional_input_is_allowed() -> None:
    two = identity() + 'input { name: "z" data_type: TYPE_INT32 dims: [1] }'
    with pytest.raises(ConfigError, match="input 'z' of target 'a' is missing; leave out input to have those of the"):
        completed(router("a = 1", tensors()), a=two)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (identity(datatype="INT32"), "input 'x' is TYPE_INT32 [-1] in 'b' and TYPE_FP32 [-1] in 'a'"),
        (identity(dims="2"), "input 'x' is TYPE_FP32 [2] in 'b' and TYPE_FP32 [-1] in 'a'"),
        (identity(0), "max_batch_size is 0 in 'b' and 8 in 'a'"),
        (
            identity(more="model_transaction_policy { decoupled: true }"),
            "the transaction policy is decoupled in 'b' and not decoupled in 'a'",
        ),
        (identity(more='input { name: "z" data_type: TYPE_INT32 dims: [1] }'), "input 'z' is TYPE_INT32 [1] in 'b'"),
        (identity().replace('"y"', '"other"'), "output 'y' is missing in 'b' and TYPE_FP32 [-1] in 'a'"),
    ],
)
def test_incompatible_targets_are_refused(model: str, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        completed(router("a = 1, b = 1"), a=identity(), b=model)
    assert caught.value.message.startswith("router 'r': target 'b' cannot stand for 'a': ")
    assert why in caught.value.message
    assert caught.value.field == "parameters['scheduler.targets']"


def test_without_the_baseline_nothing_is_compared() -> None:
    completed_config = completed(router("a = 1, b = 1"), b=identity())
    assert not completed_config.input
