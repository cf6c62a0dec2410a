"""Texts: docs/spec/behaviours.md sections 10.1 and 10.2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from headrace import Code, ConfigError, HeadraceError

A = 'input { name: "A" data_type: TYPE_FP32 dims: [16] }'
B = 'input { name: "B" data_type: TYPE_FP32 dims: [16] }'
S = 'output { name: "S" data_type: TYPE_FP32 dims: [16] }'


def refusal(graphs: Any, path: Any, config: str) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        graphs.serve(path, config)
    return caught.value


def test_a_matching_config_is_accepted(graphs: Any) -> None:
    graphs.serve(graphs.add(), f"max_batch_size: 4 {A} {B} {S}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            f"max_batch_size: 4 {A} {S}",
            "unable to load model 'm', configuration expects 1 inputs, model provides 2",
        ),
        (
            f"max_batch_size: 4 {A} {B.replace('B', 'X')} {S}",
            "unexpected inference input 'X', allowed inputs are: A, B",
        ),
        (
            f'max_batch_size: 4 {A} {B} output {{ name: "T" data_type: TYPE_FP32 dims: [16] }}',
            "unexpected inference output 'T', allowed outputs are: D, S",
        ),
        (
            f"max_batch_size: 4 {A} {B.replace('FP32', 'INT8')} {S}",
            "unable to load model 'm', configuration expects datatype TYPE_INT8 for input 'B', model provides "
            "TYPE_FP32",
        ),
        (
            f"max_batch_size: 4 {A} {B} {S.replace('FP32', 'STRING')}",
            "unable to load model 'm', configuration expects datatype TYPE_STRING for output 'S', model provides "
            "TYPE_FP32",
        ),
        (
            f"max_batch_size: 4 {A} {B.replace('16', '15')} {S}",
            "model 'm', tensor 'B': the model expects 2 dimensions (shape [-1,16]) but the model configuration "
            "specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            "tensor shape, making complete shape [-1,15])",
        ),
        (
            f"{A} {B} {S}",
            "model 'm', tensor 'A': the model expects 2 dimensions (shape [-1,16]) but the model configuration "
            "specifies 1 dimensions (shape [16])",
        ),
        (
            f"max_batch_size: 4 {A} {B} {S.replace('16', '-1')}",
            "model 'm', tensor 'S': the model expects 2 dimensions (shape [-1,16]) but the model configuration "
            "specifies 2 dimensions (an initial batch dimension because max_batch_size > 0 followed by the explicit "
            "tensor shape, making complete shape [-1,-1])",
        ),
    ],
)
def test_a_disagreement_is_refused_in_tritons_words(graphs: Any, config: str, message: str) -> None:
    error = refusal(graphs, graphs.add(), config)
    assert error.message == message
    assert error.code is Code.INVALID_ARGUMENT


def test_a_batch_size_for_a_fixed_batch_is_refused(graphs: Any) -> None:
    error = refusal(graphs, graphs.add(rows=3), f"max_batch_size: 4 {A} {B} {S}")
    assert error.message == (
        "model 'm', tensor 'A': for the model to support batching the shape should have at least 1 dimension and the "
        "first dimension must be -1; but shape expected by the model is [3,16]"
    )


def test_a_variable_input_may_be_fixed_by_the_config_but_an_output_may_not(graphs: Any) -> None:
    path = graphs.identity(TensorProto.FLOAT, ["n", "m"])
    graphs.serve(
        path,
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 3 } '
        'output { name: "y" data_type: TYPE_FP32 dims: -1 }',
    )
    error = refusal(
        graphs,
        path,
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 3 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 3 }',
    )
    assert "tensor 'y': the model expects 2 dimensions (shape [-1,-1])" in error.message


def test_the_reshape_must_match_the_graph(graphs: Any) -> None:
    graphs.serve(
        graphs.identity(TensorProto.FLOAT, ["n", 2, 8]),
        'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 16 reshape { shape: [2, 8] } } '
        'output { name: "y" data_type: TYPE_FP32 dims: 16 reshape { shape: [2, 8] } }',
    )


def test_a_scalar_takes_only_ones(graphs: Any) -> None:
    error = refusal(
        graphs,
        graphs.identity(TensorProto.FLOAT, []),
        'input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 1 }',
    )
    assert error.message == (
        "unable to load model 'm', scalar tensor 'x', should only provide 1 in the model configuration when the model "
        "doesn't support batching. Model configuration provided: [2]."
    )


@pytest.fixture
def defaulted(graphs: Any) -> Any:
    """``y = x + W`` where W is an input with a default."""
    default = helper.make_tensor("W", TensorProto.FLOAT, [2], [5, 6])
    return graphs.write(
        [helper.make_node("Add", ["x", "W"], ["y"])],
        {"x": (TensorProto.FLOAT, [3, 2]), "W": (TensorProto.FLOAT, [2])},
        {"y": (TensorProto.FLOAT, [3, 2])},
        [default],
    )


X = 'input { name: "x" data_type: TYPE_FP32 dims: [3, 2] }'
W = 'input { name: "W" data_type: TYPE_FP32 dims: 2 optional: true }'
Y = 'output { name: "y" data_type: TYPE_FP32 dims: [3, 2] }'


def test_an_optional_input_must_have_a_default_in_the_graph(graphs: Any, defaulted: Any) -> None:
    graphs.serve(defaulted, f"{X} {W} {Y}")
    error = refusal(graphs, defaulted, f"{X.replace('dims', 'optional: true dims')} {W} {Y}")
    assert error.message == "unable to load model 'm', configuration expects 0 inputs, model provides 1"


def test_an_optional_input_of_a_batching_model_is_refused(graphs: Any) -> None:
    default = helper.make_tensor("W", TensorProto.FLOAT, [1, 2], [5, 6])
    path = graphs.write(
        [helper.make_node("Add", ["x", "W"], ["y"])],
        {"x": (TensorProto.FLOAT, ["n", 2]), "W": (TensorProto.FLOAT, ["n", 2])},
        {"y": (TensorProto.FLOAT, ["n", 2])},
        [default],
    )
    io = "data_type: TYPE_FP32 dims: 2"
    error = refusal(
        graphs,
        path,
        f'max_batch_size: 4 input {{ name: "x" {io} }} input {{ name: "W" {io} optional: true }} '
        f'output {{ name: "y" {io} }}',
    )
    assert error.message == (
        "unable to load model 'm', optional input 'W' is not supported for models that support batching"
    )


def test_a_ragged_input_must_be_flat_in_the_graph(graphs: Any) -> None:
    error = refusal(
        graphs, graphs.add(), f"max_batch_size: 4 {A.replace('dims', 'allow_ragged_batch: true dims')} {B} {S}"
    )
    assert error.message == (
        "unable to load model 'm', configuration expects model provides input with shape [-1] for ragged input 'A', "
        "model provides [-1,16]"
    )


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (
            'target_name: "B2" data_type: TYPE_FP32',
            "unexpected inference input 'B2', allowed inputs are: A, B",
        ),
        (
            'target_name: "B" data_type: TYPE_INT32',
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'B', "
            "model provides TYPE_FP32",
        ),
    ],
)
def test_a_batch_input_must_be_an_input_of_the_graph(graphs: Any, made: str, reason: str) -> None:
    batch_input = f'batch_input {{ kind: BATCH_ELEMENT_COUNT {made} source_input: "A" }}'
    error = refusal(graphs, graphs.add(), f"max_batch_size: 4 {A} {S} {batch_input}")
    assert isinstance(error, ConfigError)
    assert error.message == reason


def test_a_sequence_control_must_be_an_input_of_the_graph(graphs: Any) -> None:
    control = 'sequence_batching { control_input { name: "START" control { int32_false_true: [0, 1] } } }'
    error = refusal(graphs, graphs.add(), f"max_batch_size: 4 {A} {B} {S} {control}")
    assert error.message == "configuration specified sequence control 'START', but model does not provide that input"
    assert error.code is Code.INTERNAL


def test_a_sequence_control_has_one_element_per_row(graphs: Any) -> None:
    control = 'sequence_batching { control_input { name: "B" control { fp32_false_true: [0, 1] } } }'
    error = refusal(graphs, graphs.add(), f"max_batch_size: 4 {A} {S} {control}")
    assert isinstance(error, ConfigError)
    assert error.message == (
        "unable to load model 'm', sequence control 'B' in model has dims [16] but dims [1] is expected"
    )


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (
            'input_name: "B" output_name: "D2" data_type: TYPE_FP32',
            "unexpected inference output 'D2', allowed outputs are: D, S",
        ),
        (
            'input_name: "B2" output_name: "D" data_type: TYPE_FP32',
            "unexpected inference input 'B2', allowed inputs are: A, B",
        ),
        (
            'input_name: "B" output_name: "D" data_type: TYPE_INT32',
            "unable to load model 'm', configuration expects datatype TYPE_INT32 for input 'B', "
            "model provides TYPE_FP32",
        ),
    ],
)
def test_a_state_must_be_an_input_and_an_output_of_the_graph(graphs: Any, state: str, reason: str) -> None:
    config = f"max_batch_size: 4 {A} {S} sequence_batching {{ state {{ {state} dims: 16 }} }}"
    error = refusal(graphs, graphs.add(), config)
    assert isinstance(error, ConfigError)
    assert error.message == reason


def test_a_state_is_an_output_and_an_input(graphs: Any, pair: Any) -> None:
    a, b = pair
    state = 'sequence_batching { state { input_name: "B" output_name: "D" data_type: TYPE_FP32 dims: 16 } }'
    outputs = graphs.serve(graphs.add(), f"max_batch_size: 4 {A} {S} {state}").execute({"A": a, "B": b})
    np.testing.assert_array_equal(outputs["S"], a + b)
    np.testing.assert_array_equal(outputs["D"], a - b)
