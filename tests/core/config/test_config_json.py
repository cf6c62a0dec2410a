"""A config in JSON (docs/spec/behaviours.md section 1.6), checked against tritonclient's own schema."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from google.protobuf import json_format, text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as theirs

from headrace.config import model_config_pb2 as pb
from headrace.config.config_json import config_to_json, parse_json
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.parse import MAX_BYTES, parse_text
from headrace.errors import ConfigError

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


def shown(text: str) -> dict[str, Any]:
    """Return ``config`` converted to JSON and back, as a client receives it."""
    document: dict[str, Any] = json.loads(json.dumps(config_to_json(text_format.Parse(text, ModelConfig()))))
    return document


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
    assert at(shown(text), path) == value


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        (TEXT, "instance_group.0.secondary_devices.0.device_id", "7"),
        (TEXT, "optimization.cuda.graph_spec.0.input.a.dim", ["3"]),
        (DIRECT, "sequence_batching.state.0.initial_state.0.dims", ["17"]),
    ],
)
def test_these_64_bit_integers_are_strings_as_in_triton(text: str, path: str, value: object) -> None:
    assert at(shown(text), path) == value


def test_names_are_those_of_the_schema_and_enums_are_words() -> None:
    document = shown(TEXT)
    assert document["max_batch_size"] == 8
    assert at(document, "input.0.data_type") == "TYPE_STRING"
    assert at(document, "instance_group.0.kind") == "KIND_GPU"


def test_defaults_are_printed_and_unset_messages_are_not() -> None:
    document = shown("dynamic_batching { }")
    assert (document["name"], document["max_batch_size"], document["input"], document["parameters"]) == ("", 0, [], {})
    assert document["dynamic_batching"]["preserve_ordering"] is False
    assert document["dynamic_batching"]["max_queue_delay_microseconds"] == 0
    assert not {"optimization", "version_policy", "sequence_batching", "response_cache"} & document.keys()
    assert shown("input { }")["input"][0] == {
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
    assert json_format.ParseDict(shown(text), theirs.ModelConfig()) == text_format.Parse(text, theirs.ModelConfig())


BAD_JSONS = [
    ("{", "not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ("[]", "expected a JSON object, found list"),
    ("null", "expected a JSON object, found NoneType"),
    ('{"name":"a","name":"b"}', "not JSON: 'name' is given more than once"),
    ('{"max_batchsize":3}', "ModelConfig has no field 'max_batchsize'; did you mean 'max_batch_size'?"),
    ('{"input":[{},{"nam":"a"}]}', "input[1]: ModelInput has no field 'nam'; did you mean 'name'?"),
    (
        '{"parameters":{"a":{"x":1}}}',
        "parameters[\"a\"]: ModelParameter has no field 'x'; its fields are string_value",
    ),
    ('{"input":3}', "Failed to parse input field: repeated field input must be in [] which is 3"),
    (
        '{"model_warmup":[{"inputs":{"a":{"data_type":"TYPE_X"}}}]}',
        "Failed to parse data_type field: Invalid enum value TYPE_X for enum type DataType at "
        "model_warmup[0].inputs[a].data_type",
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD_JSONS)
def test_a_bad_json_is_refused_in_tritons_words(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_json(text)
    assert caught.value.message == f"Invalid config override: {message}"


def test_json_takes_both_spellings_of_names_and_any_case_of_enums() -> None:
    snake = parse_json('{"max_batch_size": 4, "input": [{"name": "a", "data_type": "type_fp32", "dims": ["3", -1]}]}')
    camel = parse_json('{"maxBatchSize": 4, "input": [{"name": "a", "dataType": "TYPE_FP32", "dims": [3, "-1"]}]}')
    wanted = ModelConfig(max_batch_size=4, input=[pb.ModelInput(name="a", data_type=pb.TYPE_FP32, dims=[3, -1])])
    assert snake == camel == wanted


CONFIG = text_format.Parse(TEXT, ModelConfig())


@pytest.mark.parametrize(
    "text",
    [
        "{max_batch_size:4,parameters:{foo:{string_value:'x'}}}",
        "{'max_batch_size':4,\"parameters\":{ foo : {'string_value':\"x\"}}}",
        "{\n maxBatchSize\n:'4', parameters:{foo:{string_value:'x',},}, }",
        '{max_batch_size:4e0,parameters:{"foo":{"string_value":"x"}}}',
    ],
)
def test_json_is_as_lenient_as_tritons_parser(text: str) -> None:
    """The expected results here and in the next tests were recorded from Triton 2.51."""
    assert parse_json(text) == parse_text('max_batch_size: 4 parameters { key: "foo" value { string_value: "x" } }')


@pytest.mark.parametrize(
    ("text", "backend"),
    [
        ("{backend:'py\\'on'}", "py'on"),
        ("{backend:'py\"on'}", 'py"on'),
        ('{backend:"py\'on"}', "py'on"),
        ("{backend:'a:b,}'}", "a:b,}"),
        ('{backend:"{a:1,}"}', "{a:1,}"),
        ("{backend:'\\u0041\\\\'}", "A\\"),
        ('{"backend":"py\nthon"}', "py\nthon"),
    ],
)
def test_strings_keep_what_they_hold(text: str, backend: str) -> None:
    assert parse_json(text).backend == backend


def test_booleans_may_be_words_in_quotes() -> None:
    assert parse_json('{response_cache:{enable:"true"}}').response_cache.enable


@pytest.mark.parametrize(
    "text",
    [
        "{backend:python}",
        "{a-b:1}",
        "{true:1}",
        "{1:1}",
        "{parameters:{a.b:{string_value:'x'}}}",
        "{parameters:{\u00e9:{string_value:'x'}}}",
        "{,}",
        "{backend:'x',,}",
        "{input:[,]}",
        "{backend:'x';}",
        "{backend:'x'} x",
        "{backend:'x' /* c */}",
        "{backend:'x}",
        "{max_batch_size:0x4}",
    ],
)
def test_json_that_tritons_parser_refuses_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^Invalid config override: "):
        parse_json(text)


@pytest.mark.parametrize("part", ['"\\"', "'\\'", "a", " ", ", ", "[,", "a:", "\\"])
def test_a_long_run_of_anything_is_refused_in_linear_time(part: str) -> None:
    """A search in quadratic time would take minutes."""
    with pytest.raises(ConfigError):
        parse_json("{'" + part * (200_000 // len(part)))
    with pytest.raises(ConfigError):
        parse_json("{" + part * (200_000 // len(part)))


def test_text_and_json_give_the_same_config() -> None:
    assert parse_text(text_format.MessageToString(CONFIG)) == CONFIG
    assert parse_json(json_format.MessageToJson(CONFIG)) == CONFIG
    assert parse_json(json_format.MessageToJson(CONFIG, preserving_proto_field_name=True)) == CONFIG


@given(st.integers(0, 10**9), st.sampled_from(["{", "}", '"', "[", "null", "-1", "1e400", "\0", '{"a":1}']))
def test_no_damage_to_a_json_gets_past_config_error(where: int, junk: str) -> None:
    text = json_format.MessageToJson(CONFIG)
    where %= len(text)
    for damaged in (text[:where], text[:where] + junk + text[where:], text[:where] + text[where + 1 :]):
        outcome_of(damaged)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "key", "dims", "1"]), inner),
    max_leaves=5,
)


@given(st.sampled_from([field.name for field in ModelConfig.DESCRIPTOR.fields]), VALUES)
def test_a_json_value_of_any_kind_gives_a_config_or_a_config_error(field: str, value: object) -> None:
    outcome_of(json.dumps({field: value}))


@pytest.mark.parametrize("opening", ["[", '{"a":', '{"input":[', '{"parameters":{"a":'])
def test_a_million_levels_of_json_are_refused(opening: str) -> None:
    with pytest.raises(ConfigError, match=r"^Invalid config override: not JSON"):
        parse_json(opening * (1_000_000 // len(opening)))


def test_json_over_the_limit_is_refused() -> None:
    with pytest.raises(ConfigError, match=rf"^Invalid config override: .* the limit is {MAX_BYTES}$"):
        parse_json(" " * (MAX_BYTES + 1))


def outcome_of(text: str) -> None:
    """Parse; anything but a config or a `ConfigError` fails the test."""
    with suppress(ConfigError):
        assert isinstance(parse_json(text), ModelConfig)
