"""The config's JSON form (docs/spec/behaviours.md section 1.6), judged by tritonclient's own schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2 as theirs

from headrace.config.json_form import config_to_json
from headrace.config.model_config_pb2 import ModelConfig

TEXT = """
    name: "m" backend: "x" max_batch_size: 8 version_policy { specific { versions: [ 1, 9007199254740993 ] } }
    input [ { name: "a" data_type: TYPE_STRING dims: [ -1, 2 ] reshape { shape: [ -1, 2, 1 ] } } ]
    output [ { name: "b" data_type: TYPE_FP32 dims: [ 1 ] reshape { } } ]
    instance_group [ { kind: KIND_GPU gpus: [ 0 ] secondary_devices { device_id: 7 } } ]
    optimization { cuda { graph_spec { input { key: "a" value { dim: [ 3 ] } } } } }
    parameters { key: "p" value { string_value: "v" } }
    model_warmup { name: "w" batch_size: 1 inputs { key: "a" value { dims: [ 5 ] zero_data: true } } }
"""
DYNAMIC = """
    dynamic_batching {
      max_queue_delay_microseconds: 11 priority_levels: 2 default_priority_level: 1
      default_queue_policy { default_timeout_microseconds: 12 }
      priority_queue_policy { key: 2 value { default_timeout_microseconds: 13 } } }
"""
DIRECT = """
    sequence_batching {
      max_sequence_idle_microseconds: 14 direct { max_queue_delay_microseconds: 15 }
      state { input_name: "s" dims: [ 16 ] initial_state { dims: [ 17 ] } } }
"""
OLDEST = "sequence_batching { oldest { max_queue_delay_microseconds: 18 } }"
ENSEMBLE = 'ensemble_scheduling { step { model_name: "n" model_version: -1 input_map { key: "a" value: "b" } } }'


def form(text: str) -> dict[str, Any]:
    """Through JSON and back, as a client has it."""
    found: dict[str, Any] = json.loads(json.dumps(config_to_json(text_format.Parse(text, ModelConfig()))))
    return found


def at(node: Any, path: str) -> Any:
    for part in path.split("."):
        node = node[int(part)] if isinstance(node, list) else node[part]
    return node


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        (TEXT, "input.0.dims", [-1, 2]),
        (TEXT, "input.0.reshape.shape", [-1, 2, 1]),
        (TEXT, "output.0.dims", [1]),
        (TEXT, "output.0.reshape.shape", []),
        (TEXT, "version_policy.specific.versions", [1, 9007199254740993]),
        (TEXT, "model_warmup.0.inputs.a.dims", [5]),
        (DYNAMIC, "dynamic_batching.max_queue_delay_microseconds", 11),
        (DYNAMIC, "dynamic_batching.priority_levels", 2),
        (DYNAMIC, "dynamic_batching.default_priority_level", 1),
        (DYNAMIC, "dynamic_batching.default_queue_policy.default_timeout_microseconds", 12),
        (DYNAMIC, "dynamic_batching.priority_queue_policy.2.default_timeout_microseconds", 13),
        (DIRECT, "sequence_batching.max_sequence_idle_microseconds", 14),
        (DIRECT, "sequence_batching.direct.max_queue_delay_microseconds", 15),
        (DIRECT, "sequence_batching.state.0.dims", [16]),
        (OLDEST, "sequence_batching.oldest.max_queue_delay_microseconds", 18),
        (ENSEMBLE, "ensemble_scheduling.step.0.model_version", -1),
    ],
)
def test_these_64_bit_integers_are_numbers(text: str, path: str, value: object) -> None:
    assert at(form(text), path) == value


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        (TEXT, "instance_group.0.secondary_devices.0.device_id", "7"),
        (TEXT, "optimization.cuda.graph_spec.0.input.a.dim", ["3"]),
        (DIRECT, "sequence_batching.state.0.initial_state.0.dims", ["17"]),
    ],
)
def test_these_64_bit_integers_are_strings_as_in_triton(text: str, path: str, value: object) -> None:
    assert at(form(text), path) == value


def test_names_are_those_of_the_schema_and_enums_are_words() -> None:
    found = form(TEXT)
    assert found["max_batch_size"] == 8
    assert at(found, "input.0.data_type") == "TYPE_STRING"
    assert at(found, "instance_group.0.kind") == "KIND_GPU"


def test_defaults_are_printed_and_unset_messages_are_not() -> None:
    found = form("dynamic_batching { }")
    assert (found["name"], found["max_batch_size"], found["input"], found["parameters"]) == ("", 0, [], {})
    assert found["dynamic_batching"]["preserve_ordering"] is False
    assert found["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert not {"optimization", "version_policy", "sequence_batching", "response_cache"} & found.keys()
    assert form("input { }")["input"][0] == {
        "name": "",
        "data_type": "TYPE_INVALID",
        "format": "FORMAT_NONE",
        "dims": [],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    }


@pytest.mark.parametrize("scheduling", ["", DYNAMIC, DIRECT, OLDEST, ENSEMBLE])
def test_tritonclients_schema_reads_the_same_config_back(scheduling: str) -> None:
    text = TEXT + scheduling
    assert json_format.ParseDict(form(text), theirs.ModelConfig()) == text_format.Parse(text, theirs.ModelConfig())
