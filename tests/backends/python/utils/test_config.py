"""`ModelConfig`; the texts are those of Triton's resource file."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import triton_python_backend_utils as pb_utils


def config(**fields: Any) -> pb_utils.ModelConfig:
    defaults = {"name": "m", "max_batch_size": 0, "input": [], "output": []}
    return pb_utils.ModelConfig(json.dumps(defaults | fields))


X = {"name": "x", "data_type": "TYPE_FP32", "dims": [4]}
ADD: list[Any] = [("input", pb_utils.ModelConfig.add_input), ("output", pb_utils.ModelConfig.add_output)]


def test_config_is_completed_in_place() -> None:
    completed = config()
    completed.set_max_batch_size(8)
    completed.set_dynamic_batching()
    completed.add_input(X | {"optional": True})
    completed.add_output(X)
    completed.set_model_transaction_policy({"decoupled": True})

    assert completed.as_dict() == {
        "name": "m",
        "max_batch_size": 8,
        "input": [X | {"optional": True}],
        "output": [X],
        "dynamic_batching": {},
        "model_transaction_policy": {"decoupled": True},
    }
    assert completed.as_dict() is completed.as_dict()


@pytest.mark.parametrize(("kind", "add"), ADD)
def test_declared_tensor_is_completed_and_keeps_the_rest(kind: str, add: Callable[..., None]) -> None:
    declared = config(**{kind: [{"name": "x", "data_type": "TYPE_INVALID", "dims": [], "label_filename": "l"}]})
    add(declared, X)
    add(declared, X)
    assert declared.as_dict()[kind] == [X | {"label_filename": "l"}]


def test_a_configured_scheduler_is_kept() -> None:
    batched = config(dynamic_batching={"preferred_batch_size": [4]})
    batched.set_dynamic_batching()
    assert batched.as_dict()["dynamic_batching"] == {"preferred_batch_size": [4]}


def test_larger_batch_than_the_configs_is_taken() -> None:
    completed = config(max_batch_size=4)
    completed.set_max_batch_size(8)
    assert completed.as_dict()["max_batch_size"] == 8


def test_policy_without_decoupled_is_empty() -> None:
    completed = config()
    completed.set_model_transaction_policy({})
    assert completed.as_dict()["model_transaction_policy"] == {}


WHERE = "in auto-complete-config function for model 'm'"


@pytest.mark.parametrize(
    ("fields", "change", "text"),
    [
        (
            {"max_batch_size": 8},
            lambda c: c.set_max_batch_size(4),
            f"configuration specified max_batch_size 8, but {WHERE} specified max_batch_size 4",
        ),
        *[
            (
                {scheduler: {}},
                lambda c: c.set_dynamic_batching(),
                f"Configuration specified scheduling_choice as '{scheduler}', but auto-complete-config function "
                "for model 'm' tries to set scheduling_choice as 'dynamic_batching'",
            )
            for scheduler in ("sequence_batching", "ensemble_scheduling")
        ],
        (
            {},
            lambda c: c.add_input(X | {"reshape": {}}),
            f"input 'x' {WHERE} contains property other than 'name', 'data_type', 'dims' and 'optional'.",
        ),
        (
            {},
            lambda c: c.add_output(X | {"optional": True}),
            f"output 'x' {WHERE} contains property other than 'name', 'data_type' and 'dims'.",
        ),
        ({}, lambda c: c.add_input({"dims": [1]}), f"input {WHERE} is missing 'name' property."),
        ({}, lambda c: c.add_output({"name": "x", "dims": []}), f"output 'x' {WHERE} is missing 'data_type' property."),
        (
            {},
            lambda c: c.add_input({"name": "x", "data_type": "TYPE_FP32"}),
            f"input 'x' {WHERE} is missing 'dims' property.",
        ),
        (
            {"input": [X]},
            lambda c: c.add_input(X | {"data_type": "TYPE_INT8"}),
            "unable to load model 'm', configuration expects datatype TYPE_FP32 for input 'x', "
            "model provides TYPE_INT8",
        ),
        (
            {"output": [X]},
            lambda c: c.add_output(X | {"dims": [5]}),
            "model 'm', tensor 'x': the model expects dims [5] but the model configuration specifies dims [4]",
        ),
        (
            {"input": [X | {"optional": False}]},
            lambda c: c.add_input(X | {"optional": True}),
            "model 'm', tensor 'x': the model expects optional True "
            "but the model configuration specifies optional False",
        ),
        (
            {},
            lambda c: c.set_model_transaction_policy({"coupled": 1}),
            "model transaction property in auto-complete-config function for model 'm' "
            "contains property other than 'decoupled'.",
        ),
        (
            {"model_transaction_policy": {"decoupled": False}},
            lambda c: c.set_model_transaction_policy({"decoupled": True}),
            "trying to change decoupled property in auto-complete-config for model 'm', "
            "which is already set to 'False'.",
        ),
    ],
)
def test_contradiction_is_refused_and_changes_nothing(
    fields: dict[str, Any], change: Callable[[pb_utils.ModelConfig], None], text: str
) -> None:
    refusing = config(**fields)
    before = json.dumps(refusing.as_dict())
    with pytest.raises(ValueError, match=r".") as refusal:
        change(refusing)
    assert str(refusal.value) == text
    assert json.dumps(refusing.as_dict()) == before
