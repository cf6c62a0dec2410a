"""The values of the parameter ``padding`` that are accepted, and the errors for the others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from headrace.config.config_json import config_to_json
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.padding import PaddingRules
from headrace.errors import ConfigError, InvalidArgument

CONFIG = """name: "m" max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [-1, 4] }
input { name: "text" data_type: TYPE_STRING dims: [-1] }
input { name: "r" data_type: TYPE_FP32 dims: [-1] reshape { shape: [-1, 1] } }
output { name: "y" data_type: TYPE_FP32 dims: [-1, 4] }
output { name: "fixed" data_type: TYPE_FP32 dims: [4] }
"""
PAD = {"input": "x", "axis": 0, "buckets": [4, 8]}


def rules(parameter: Any, config: str = CONFIG) -> PaddingRules:
    model = text_format.Parse(config, ModelConfig())
    text = parameter if isinstance(parameter, str) else json.dumps(parameter)
    model.parameters["padding"].string_value = text
    padding = PaddingRules.from_json(config_to_json(model))
    assert padding is not None
    return padding


def test_a_model_without_the_parameter_has_no_rules() -> None:
    assert PaddingRules.from_json(config_to_json(text_format.Parse(CONFIG, ModelConfig()))) is None


def test_sizes_go_up_to_the_next_bucket_and_rows_likewise() -> None:
    padding = rules({"pad": [PAD], "pad_batch_to": [1, 4, 8]})
    assert [padding.shape("x", (2, size, 4)) for size in (0, 1, 4, 5, 8)] == [(2, n, 4) for n in (4, 4, 4, 8, 8)]
    assert [padding.rows(rows) for rows in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]
    assert padding.shape("text", (2, 9)) == (2, 9)


def test_requests_of_one_bucket_share_a_batch() -> None:
    padding = rules({"pad": [PAD]})

    def key(size: int) -> object:
        return padding.key({"x": np.zeros((1, size, 4))})

    assert key(1) == key(4) != key(5) == key(8)


def test_size_above_all_buckets_is_refused_with_name_axis_size_and_buckets() -> None:
    with pytest.raises(InvalidArgument) as caught:
        rules({"pad": [PAD]}).key({"x": np.zeros((1, 9, 4))})
    assert caught.value.message == (
        "input 'x' has size 9 on axis 0, but the largest bucket that it can be padded to is 8 of [4, 8]"
    )


def test_outputs_follow_the_first_pad_of_their_variable_axis_by_default() -> None:
    assert {name: [(cut.axis, cut.must) for cut in cuts] for name, cuts in rules({"pad": [PAD]}).cuts.items()} == {
        "y": [(0, False)]
    }
    padding = rules({"pad": [PAD], "unpad": [{"output": "y", "axis": 0, "input": "x"}]})
    assert [(cut.axis, cut.pad.name, cut.must) for cut in padding.cuts["y"]] == [(0, "x", True)]
    assert rules({"pad": [PAD], "unpad": []}).cuts == {}


@pytest.mark.parametrize(
    ("parameter", "why"),
    [
        ("{", "expected JSON: "),
        ("[" * 100_000, "expected JSON: "),
        ([], "the parameter is [], expected an object"),
        ({}, "it has neither 'pad' nor 'pad_batch_to'"),
        ({"pads": []}, "the parameter has an unknown key 'pads'; known: pad, unpad, pad_batch_to"),
        ({"pad": {}}, "pad is {}, expected an array"),
        ({"pad": [{**PAD, "bucket": 3}]}, "pad[0] has an unknown key 'bucket'; known: input, axis, buckets, value,"),
        ({"pad": [{"axis": 0}]}, "pad[0].input is null, expected a name"),
        ({"pad": [{**PAD, "input": "q"}]}, "pad[0] names input 'q', the model has x, text, r"),
        ({"pad": [{**PAD, "input": "text", "value": 3}]}, "pad[0].value is 3, expected a value of TYPE_STRING"),
        (
            {"pad": [{**PAD, "input": "text", "value": "\ud800"}]},
            "pad[0].value is \\ud800..., expected a value of TYPE_STRING",
        ),
        ({"pad": [{**PAD, "input": "r"}]}, "pad[0]: input 'r' has a reshape, and cannot be padded"),
        ({"pad": [{**PAD, "axis": 2}]}, "pad[0].axis is 2, expected an axis of input 'x': 0 to 1"),
        ({"pad": [{**PAD, "axis": True}]}, "pad[0].axis is true, expected an axis of input 'x': 0 to 1"),
        ({"pad": [{**PAD, "axis": 1}]}, "pad[0]: axis 1 of input 'x' is 4 in the config, and only a variable one can"),
        (
            {"pad": [{**PAD, "buckets": [8, 4]}]},
            "pad[0].buckets is [8, 4], expected whole numbers from 1 on, ascending",
        ),
        ({"pad": [{**PAD, "buckets": []}]}, "pad[0].buckets is [], expected whole numbers from 1 on, ascending"),
        (
            {"pad": [{**PAD, "buckets": [0, 4]}]},
            "pad[0].buckets is [0, 4], expected whole numbers from 1 on, ascending",
        ),
        ({"pad": [{**PAD, "buckets": 4}]}, "pad[0].buckets is 4, expected an array"),
        ({"pad": [{**PAD, "value": "a"}]}, "pad[0].value is a, expected a value of TYPE_INT32"),
        ({"pad": [{**PAD, "value": 0.5}]}, "pad[0].value is 0.5, expected a value of TYPE_INT32"),
        ({"pad": [{**PAD, "value": 1 << 40}]}, "pad[0].value is 1099511627776, expected a value of TYPE_INT32"),
        ({"pad": [PAD, PAD]}, "axis 0 of input 'x' is padded twice"),
        (
            {"pad": [{**PAD, "length": {"name": "x", "data_type": "TYPE_INT32"}}]},
            "pad[0].length: 'x' is an input already",
        ),
        (
            {"pad": [{**PAD, "mask": {"name": "k", "data_type": "TYPE_INT8"}}]},
            "pad[0].mask: data_type is 'TYPE_INT8', exp",
        ),
        ({"pad_batch_to": [1, 4]}, "pad_batch_to ends with 4, expected max_batch_size, which is 8"),
        ({"pad_batch_to": [16]}, "pad_batch_to ends with 16, expected max_batch_size, which is 8"),
        ({"pad": [PAD], "unpad": [{"output": "z", "axis": 0}]}, "unpad[0] names output 'z', the model has y, fixed"),
        (
            {"pad": [PAD], "unpad": [{"output": "fixed", "axis": 0, "input": "x"}]},
            "unpad[0]: axis 0 of output 'fixed' is 4",
        ),
        (
            {"pad": [PAD], "unpad": [{"output": "y", "axis": 0, "input": "x", "input_axis": 1}]},
            "unpad[0]: axis 1 of input 'x' is not padded",
        ),
    ],
)
def test_invalid_padding_is_reported_with_its_place(parameter: Any, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rules(parameter)
    assert caught.value.message.startswith(f"model 'm': parameter 'padding': {why}")
    assert caught.value.field == "parameters['padding']"


def test_a_model_with_ragged_batches_is_not_padded_as_well() -> None:
    with pytest.raises(ConfigError, match="a model with ragged batches cannot have it"):
        rules({"pad": [PAD]}, CONFIG.replace("dims: [-1, 4] }", "dims: [-1, 4] allow_ragged_batch: true }", 1))
