"""The executions that are captured, and the graph that runs a smaller batch."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from headrace import ConfigError
from headrace.config.model_config_pb2 import ModelConfig
from headrace_tensorrt.graph_specs import find, graph_specs
from headrace_tensorrt.plan_shapes import Bounds, Profile

PROFILE = Profile(0, {"x": Bounds((1, 4), (2, 8), (16, 16))}, {})


def rows_of(config: str, profile: Profile = PROFILE) -> list[tuple[int, ...]]:
    found = graph_specs(text_format.Parse(config, ModelConfig(name="m")), profile)
    return [spec.shapes["x"] for spec in found]


def spec(text: str) -> str:
    return f"max_batch_size: 16 optimization {{ cuda {{ graphs: true graph_spec {{ {text} }} }} }}"


@pytest.mark.parametrize(
    ("config", "captured"),
    [
        ("max_batch_size: 5", [1, 2, 3, 4, 5]),
        ("max_batch_size: 32", [1, 2, 3, 4, 6, 8, 12, 16]),  # the profile takes no 32
        ("max_batch_size: 16 dynamic_batching { preferred_batch_size: [ 5, 7 ] }", [1, 5, 7, 16]),
        ("max_batch_size: 16 sequence_batching { oldest { preferred_batch_size: 9 } }", [1, 9, 16]),
    ],
)
def test_the_sizes_that_batches_will_have_are_captured_with_the_best_dims(config: str, captured: list[int]) -> None:
    assert rows_of(config) == [(rows, 8) for rows in captured]


def test_without_a_batch_the_best_shapes_are_captured_and_run_alone() -> None:
    assert rows_of("") == [(2, 8)]
    several = Profile(0, {**PROFILE.shapes, "w": Bounds((1,), (5,), (9,))}, {})
    found = graph_specs(ModelConfig(name="m"), several)
    assert find(found, {"x": (2, 8), "w": (5,)}) is found[0]
    assert find(found, {"x": (1, 8), "w": (5,)}) is None
    assert find(found, {"x": (2, 8), "w": (4,)}) is None
    config = 'optimization { cuda { graph_spec { input { key: "w" value { dim: 7 } } } } }'
    (only,) = graph_specs(text_format.Parse(config, ModelConfig(name="m")), several)
    assert only.shapes == {"x": (2, 8), "w": (7,)}


def test_a_spec_may_say_dims() -> None:
    assert rows_of(spec('batch_size: 3 input { key: "x" value { dim: 5 } }')) == [(3, 5)]


def test_a_spec_that_the_profile_does_not_take_belongs_to_another() -> None:
    assert rows_of(spec('batch_size: 3 input { key: "x" value { dim: 99 } }')) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            spec("batch_size: 1").removeprefix("max_batch_size: 16"),
            "model 'm': graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0",
        ),
        (
            spec("batch_size: 17"),
            "model 'm': graph spec expects 'batch_size' to be between 1 and 'max_batch_size', which is 16, got 17",
        ),
        (spec('batch_size: 1 input { key: "z" value { dim: 5 } }'), "model 'm': graph spec has unknown input 'z'"),
        (
            spec('batch_size: 4 graph_lower_bound { batch_size: 2 input { key: "x" value { dim: 4 } } }'),
            "model 'm': optimization.cuda.graph_spec[0].graph_lower_bound differs from its graph_spec in more than the "
            "batch: only rows can be left over",
        ),
    ],
)
def test_an_invalid_spec_is_refused(config: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        rows_of(config)
    assert raised.value.message == message


def test_the_smallest_sufficient_graph_is_used() -> None:
    text = "".join(
        f"graph_spec {{ batch_size: {most} graph_lower_bound {{ batch_size: {least} }} }}"
        for most, least in ((8, 1), (4, 2))
    )
    config = text_format.Parse(f"max_batch_size: 16 optimization {{ cuda {{ {text} }} }}", ModelConfig(name="m"))
    found = graph_specs(config, PROFILE)
    chosen = {rows: find(found, {"x": (rows, 8)}) for rows in (1, 2, 3, 4, 5, 8, 9)}
    assert {rows: each and each.rows for rows, each in chosen.items()} == {1: 8, 2: 4, 3: 4, 4: 4, 5: 8, 8: 8, 9: None}
    assert find(found, {"x": (4, 7)}) is None
    assert find(found, {"x": (4, 8, 1)}) is None
