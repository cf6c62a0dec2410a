from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.parse import MAX_BYTES, find_config, parse_text, read_config
from headrace.errors import Code, ConfigError

INT32 = "a whole number from -2147483648 to 2147483647"
TYPES = (
    "TYPE_BOOL, TYPE_UINT8, TYPE_UINT16, TYPE_UINT32, TYPE_UINT64, TYPE_INT8, TYPE_INT16, TYPE_INT32, TYPE_INT64, "
    "TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_STRING, TYPE_BF16"
)

JSON = "this looks like JSON, and a config is protobuf text format: no braces around it, no quotes around names"
BAD_TEXTS = [
    ("max_batchsize: 3", "1:1: ModelConfig has no field 'max_batchsize'; did you mean 'max_batch_size'?"),
    ("MAX_BATCH_SIZE: 3", "1:1: ModelConfig has no field 'MAX_BATCH_SIZE'; did you mean 'max_batch_size'?"),
    (
        'name: "m"\n  input [ { nam: "x" } ]',
        "2:13: input[0]: ModelInput has no field 'nam'; did you mean 'name'?",
    ),
    (
        'input { name: "a" }\ninput {\n  dims: 1 # a } in a comment\n  name: "} in a string"\n  shape: 3 }',
        "5:3: input[1]: ModelInput has no field 'shape'; did you mean 'reshape'?",
    ),
    (
        'output [ { name: "a" }, { name: "b" reshape: { zzz: 1 } } ]',
        "1:48: output[1].reshape: ModelTensorReshape has no field 'zzz'; its fields are shape",
    ),
    (
        'parameters { key: "a" value: { string_val: "b" } }',
        "1:32: parameters[0].value: ModelParameter has no field 'string_val'; did you mean 'string_value'?",
    ),
    ('max_batch_size: "a"', f'1:17: max_batch_size: expected {INT32}, found "a"'),
    ("max_batch_size: 99999999999", f"1:17: max_batch_size: expected {INT32}, found 99999999999"),
    (
        "version_policy: { latest { num_versions: -1 } }",
        "1:42: version_policy.latest.num_versions: expected a whole number from 0 to 4294967295, found -1",
    ),
    (
        'input [\n  {\n    name: "a"\n    data_type: TYPE_FP31\n  }\n]',
        f"4:16: input[0].data_type: expected one of {TYPES}, found TYPE_FP31; did you mean 'TYPE_FP32'?",
    ),
    (
        "input { data_type: TYPE_BYTES }",
        f"1:20: input[0].data_type: expected one of {TYPES}, found TYPE_BYTES",
    ),
    (
        "instance_group [ { kind: GPU } ]",
        "1:26: instance_group[0].kind: expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL, found GPU; "
        "did you mean 'KIND_GPU'?",
    ),
    (
        "dynamic_batching { preserve_ordering: maybe }",
        "1:39: dynamic_batching.preserve_ordering: expected true or false, found maybe",
    ),
    ("name: 3", "1:7: name: expected a quoted string, found 3"),
    ("dynamic_batching: 3", "1:19: dynamic_batching: expected '{', found 3"),
    ("max_batch_size 3", "1:16: expected ':', found 3"),
    ("input { dims: [1,2 }", "1:20: input[0].dims: expected ',', found }"),
    ('input { name: "x" ', "1:15: input[0].name: expected '}', found the end"),
    ('name: "a" name: "b"', "1:17: name: is given more than once"),
    ("\x00", r"1:1: Expected identifier or number, got \x00"),
    ('{ "name": "a" }', f"1:1: Expected identifier or number, got {{; {JSON}"),
    ('# of m\n{ "name": "a" }', f"2:1: Expected identifier or number, got {{; {JSON}"),
    ('[ { "name": "a" } ]', f"1:3: Expected identifier; {JSON}"),
    ('"name": "a"', '1:1: Expected identifier or number, got "name"; the name of a field has no quotes'),
    (
        "input { 'name': 'a' }",
        "1:9: input[0]: Expected identifier or number, got 'name'; the name of a field has no quotes",
    ),
    ("// of m", "1:1: Expected identifier or number, got /; a comment begins with '#'"),
    ("/* of m */", "1:1: Expected identifier or number, got /; a comment begins with '#'"),
    (
        "max_batch_size: 8 // rows",
        "1:19: max_batch_size: Expected identifier or number, got /; a comment begins with '#'",
    ),
    ("max_batch_size: // rows", f"1:17: max_batch_size: expected {INT32}, found /; a comment begins with '#'"),
    ("name: /m", "1:7: name: expected a quoted string, found /"),
    (
        "dynamic_batching {} sequence_batching {}",
        '1:21: Field "sequence_batching" is specified along with field "dynamic_batching", another member of oneof '
        '"scheduling_choice" for message type "ModelConfig"',
    ),
]


@pytest.mark.parametrize(("text", "message"), BAD_TEXTS)
def test_a_bad_text_is_refused_with_line_column_field_and_reason(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(text, "m/config.pbtxt")
    assert caught.value.message == f"m/config.pbtxt:{message}"
    assert caught.value.code is Code.INVALID_ARGUMENT


CONFIG = text_format.Parse(
    """
    name: "m" backend: "identity" max_batch_size: 8
    input [ { name: "a" data_type: TYPE_STRING dims: [ -1 ] reshape { shape: [ -1, 1 ] } optional: true } ]
    output [ { name: "b" data_type: TYPE_BF16 dims: [ 1 ] reshape { } label_filename: "labels.txt" } ]
    dynamic_batching { preferred_batch_size: [ 2, 4 ] priority_levels: 2 default_priority_level: 1
      priority_queue_policy { key: 2 value { timeout_action: DELAY default_timeout_microseconds: 9 } } }
    instance_group [ { kind: KIND_GPU gpus: [ 0, 1 ] rate_limiter { resources { name: "r" count: 2 } } } ]
    parameters [ { key: "p" value { string_value: "v" } } ]
    model_metrics { metric_control { metric_identifier { family: "f" } histogram_options { buckets: [ 1.5, 2 ] } } }
    """,
    ModelConfig(),
)


@given(st.integers(0, 10**9), st.sampled_from(["{", "}", '"', "[", ":", "max_batch_size", "-1", "'", "\n", "\0", "é"]))
def test_no_damage_to_a_text_gets_past_config_error(where: int, junk: str) -> None:
    text = text_format.MessageToString(CONFIG)
    where %= len(text)
    for damaged in (text[:where], text[:where] + junk + text[where:], text[:where] + text[where + 1 :]):
        outcome_of(parse_text, damaged)


ENDS = ["", "\n", ' "n"\n', ", ", ";\n", " # n\n", '\nname: "n"\n', "\n, ", '\n"n" ', "\nname: ''\n", "\n\n"]


NAMES = ["", 'name: "m"', "name:'m'", '\n name : "m-1.x"', 'name: ""', 'name: "\\155"']
RESTS = ["", "max_batch_size: 4", 'backend: "b"', "max_batch_size: x"]


@given(st.sampled_from(NAMES), st.sampled_from(ENDS), st.sampled_from(RESTS))
def test_a_text_is_read_as_protobuf_does_whatever_it_begins_with(name: str, end: str, rest: str) -> None:
    text = name + end + rest
    try:
        expected = text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        for _ in range(2):
            with pytest.raises(ConfigError, match=f":{error.GetLine()}:{error.GetColumn()}:"):
                parse_text(text)
    else:
        assert [parse_text(text), parse_text(text)] == [expected, expected]
        parse_text(text).max_batch_size = 9  # no other process can read it
        assert parse_text(text) == expected


@pytest.mark.parametrize("opening", ["{", "[", "input {", "input [", "input <", "dynamic_batching {"])
def test_a_million_levels_of_text_are_refused(opening: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_text(opening * (1_000_000 // len(opening)))
    assert len(caught.value.message) < 1000


def test_a_huge_token_is_shortened_in_the_message() -> None:
    for text in (f"{'x' * 100_000}: 1", f"max_batch_size: {'x' * 100_000}", f'name: "{"x" * 100_000}'):
        with pytest.raises(ConfigError) as caught:
            parse_text(text)
        assert len(caught.value.message) < 1000


def test_a_config_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_text("#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match=rf"^{path}: larger than {MAX_BYTES} bytes"):
        read_config(path)


def test_a_config_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'name: "\xff"')
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert caught.value.message == f"{path}: not UTF-8 text: invalid start byte at byte 7"


def test_a_byte_order_mark_is_no_part_of_the_config(tmp_path: Path) -> None:
    path = tmp_path / "config.pbtxt"
    path.write_bytes(b'\xef\xbb\xbfname: "m"')
    assert read_config(path).name == "m"


def test_an_unreadable_config_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_config(tmp_path)


def test_the_named_config_takes_precedence_over_the_plain_one(tmp_path: Path) -> None:
    assert find_config(tmp_path, "small") is None
    plain = tmp_path / "config.pbtxt"
    plain.touch()
    assert find_config(tmp_path, "small") == plain
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.pbtxt").touch()
    assert find_config(tmp_path, "small") == tmp_path / "configs" / "small.pbtxt"
    assert find_config(tmp_path) == plain


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", "a\0b"])
def test_a_config_name_cannot_leave_the_configs_directory(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="must be a file name without directories"):
        find_config(tmp_path, name)


def outcome_of(parse: Callable[[str], ModelConfig], text: str) -> None:
    """Parse; anything but a config or a `ConfigError` fails the test."""
    with suppress(ConfigError):
        assert isinstance(parse(text), ModelConfig)
