"""Every kind of tensor that a config has a model be given, and give."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import text_format

from headrace import ConfigError, DataType, ModelConfig, dtypes
from headrace_engines import Graph

SEQUENCE = """sequence_batching {
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
  state { input_name: "before" output_name: "after" data_type: TYPE_FP16 dims: [-1, 2] }
  state { input_name: "count" output_name: "y" data_type: TYPE_INT32 dims: [7] }
}
"""
IO = """input { name: "x" data_type: TYPE_FP32 dims: [-1, 3] }
input { name: "one" data_type: TYPE_STRING dims: [1] reshape { shape: [] } optional: true }
output { name: "y" data_type: TYPE_INT32 dims: [2] }
"""
RAGGED = """max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [-1, 3] allow_ragged_batch: true }
batch_input { kind: BATCH_ITEM_SHAPE target_name: ["ends", "shapes"] data_type: TYPE_INT32 source_input: "x" }
output { name: "y" data_type: TYPE_FP32 dims: [-1] }
"""
PAD = {
    "input": "x",
    "axis": 0,
    "buckets": [4, 8],
    "length": {"name": "n", "data_type": "TYPE_INT32"},
    "mask": {"name": "there", "data_type": "TYPE_BOOL"},
}


def parse(text: str, padding: Any = None) -> ModelConfig:
    config = text_format.Parse(f'name: "m" {text}', ModelConfig())
    if padding is not None:
        config.parameters["padding"].string_value = json.dumps(padding)
    return config


def described(tensors: Any) -> list[tuple[str, DataType | None, tuple[int, ...]]]:
    assert all(name == info.name for name, info in tensors.items())
    return [(name, info.datatype, info.shape) for name, info in tensors.items()]


@pytest.mark.parametrize("rows", [0, 4])
def test_controls_and_states_of_sequences_follow_the_inputs_of_clients(rows: int) -> None:
    config, batch = parse(f"max_batch_size: {rows} {IO} {SEQUENCE}"), (-1,) if rows else ()
    assert described(Graph.of_config(config).inputs) == [
        ("x", dtypes.FP32, (*batch, -1, 3)),
        ("one", dtypes.BYTES, batch),
        ("start", None, (*batch, 1)),
        ("before", dtypes.FP16, (*batch, -1, 2)),
        ("count", dtypes.INT32, (*batch, 7)),
    ]


def test_an_output_that_is_a_state_too_is_described_as_clients_see_it() -> None:
    assert described(Graph.of_config(parse(f"{IO} {SEQUENCE}")).outputs) == [
        ("y", dtypes.INT32, (2,)),
        ("after", dtypes.FP16, (-1, 2)),
    ]


def test_ragged_inputs_have_one_axis_and_batch_inputs_follow() -> None:
    assert described(Graph.of_config(parse(RAGGED)).inputs) == [
        ("x", dtypes.FP32, (-1,)),
        ("ends", dtypes.INT32, (-1,)),
        ("shapes", dtypes.INT32, (-1,)),
    ]


@pytest.mark.parametrize(("rows", "values"), [(0, 3), (4, 4)])
def test_a_shape_tensor_begins_with_the_size_of_the_batch(rows: int, values: int) -> None:
    text = f'max_batch_size: {rows} input {{ name: "to" data_type: TYPE_INT32 dims: 3 is_shape_tensor: true }}'
    (info,) = Graph.of_config(parse(text)).inputs.values()
    assert (info.shape, info.is_shape_tensor) == ((values,), True)


def test_tensors_made_by_padding_are_last() -> None:
    config = parse(f"max_batch_size: 4 {IO}", {"pad": [PAD]})
    assert described(Graph.of_config(config).inputs)[2:] == [
        ("n", dtypes.INT32, (-1,)),
        ("there", dtypes.BOOL, (-1, -1)),
    ]


def test_padding_is_not_read_before_the_config_names_what_it_refers_to() -> None:
    assert described(Graph.of_config(parse("", {"pad": [PAD]})).inputs) == []
    with pytest.raises(ConfigError, match=r"pad\[0\] names input 'x', the model has other"):
        Graph.of_config(parse(IO.replace('"x"', '"other"'), {"pad": [PAD]}))


def test_fields_missing_in_the_config_are_unknown() -> None:
    (info,) = Graph.of_config(parse('input { name: "x" }')).inputs.values()
    assert (info.datatype, info.type, info.shape) == (None, "unknown", ())
