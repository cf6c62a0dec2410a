"""The position of a field: the caret in each text marks the expected place, by hand."""

from __future__ import annotations

import time

import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.source_map import SourceMap

MARK = "^"
PLACES = [
    ("max_batch_size", 'name: "m"\n  max_batch_size: ^-1'),
    ("name", 'max_batch_size: 1 # name: "no"\n\nname: ^"m"'),
    ("input", 'name: "m" ^input { name: "a" }'),
    ("input[0].dims", "input { dims: ^0 dims: 3 }"),
    ("input[1].dims", 'input { name: "a" dims: 1 }\ninput {\n\tdims: ^[ 1, 0 ]\n}'),
    ("input[1].name", 'input [ { name: "a" }, { name: ^"b" } ]'),
    ("input[1]", 'input [ { name: "a" },\n ^{ name: "b" } ]'),
    ("input[1]", 'input { name: "} {" } ^input { name: "b" }'),
    ("input[1]", "input < >, ^input: < >"),
    ("output[0].reshape.shape", "output { dims: 1 reshape { shape: ^[ ] } }"),
    ("dynamic_batching.preferred_batch_size[1]", "dynamic_batching { preferred_batch_size: [ 4, ^9 ] }"),
    (
        "dynamic_batching.preferred_batch_size[1]",
        "dynamic_batching { preferred_batch_size: 4 preferred_batch_size: ^9 }",
    ),
    ("model_operations.op_library_filename[1]", 'model_operations { op_library_filename: [ "a" "b", ^"c" ] }'),
    ("parameters['b']", 'parameters { key: "a" value { } }\nparameters { key: ^"b" value { string_value: "1" } }'),
    ("parameters['b']", 'parameters [ { value { } key: "a" }, { value { } key: ^"b" } ]'),
    ("parameters['b'].string_value", 'parameters { value { string_value: ^"1" } key: "b" }'),
    ("""parameters["it's].a"]""", r'parameters { key: ^"it\'s].a" value { } }'),
    ("cc_model_filenames['9.0']", 'cc_model_filenames { key: ^"9.0" value: "a" }'),
    (
        "dynamic_batching.priority_queue_policy[2].timeout_action",
        "dynamic_batching { priority_queue_policy { key: 2 value { timeout_action: ^DELAY } } }",
    ),
    ("model_warmup[0].inputs['x'].dims", 'model_warmup { inputs { key: "x" value { dims: ^-1 } } }'),
]
ABSENT = [
    ("input[0].data_type", '^input { name: "a" }'),
    ("input[1].reshape.shape", 'input { }\ninput { name: "a" ^reshape { } }'),
    ("output[0].reshape.shape[3]", "output { ^reshape { } }"),
    ("model_warmup[0].inputs['x'].dims", 'model_warmup { inputs { key: ^"x" value { } } }'),
    ("model_warmup[0].inputs['y']", '^model_warmup { inputs { key: "x" value { } } }'),
]


@pytest.mark.parametrize(("path", "marked"), PLACES)
def test_a_field_is_found_where_it_stands(path: str, marked: str) -> None:
    source_map = source_map_of(marked)
    assert source_map.find(path) == caret(marked)
    assert source_map.holds(path)


@pytest.mark.parametrize(("path", "marked"), ABSENT)
def test_an_absent_field_is_found_at_the_message_around_it(path: str, marked: str) -> None:
    source_map = source_map_of(marked)
    assert source_map.find(path) == caret(marked)
    assert not source_map.holds(path)


@pytest.mark.parametrize("path", ["", "name", "input[3].dims", "parameters['b']", "nothing.at[1].all"])
def test_absent_field_at_the_top_has_no_position(path: str) -> None:
    source_map = SourceMap('input { name: "a" } parameters { key: "a" value { } }', ModelConfig.DESCRIPTOR)
    assert source_map.find(path) is None
    assert not source_map.holds(path)


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), max_size=4), st.booleans())
def test_names_printed_by_protobuf_are_found_whatever_they_hold(names: list[str], on_one_line: bool) -> None:
    config = ModelConfig()
    for name in names:
        config.input.add(name=name, dims=[7])
        config.parameters[name].string_value = name
    text = text_format.MessageToString(config, as_one_line=on_one_line)
    source_map, lines = SourceMap(text, ModelConfig.DESCRIPTOR), text.split("\n")
    for path in (*(f"input[{index}].dims" for index in range(len(names))), *(f"parameters[{n!r}]" for n in names)):
        line, column = source_map.find(path) or (0, 0)
        assert lines[line - 1][column - 1] == ("7" if path.startswith("input") else '"')


def test_ten_thousand_fields_are_found_in_the_time_of_one_walk() -> None:
    text = "input { dims: 0 }\n" * 10_000
    source_map = SourceMap(text, ModelConfig.DESCRIPTOR)
    started = time.process_time()
    assert [source_map.find(f"input[{index}].dims") for index in (0, 9_999)] == [(1, 15), (10_000, 15)]
    assert time.process_time() - started < 1


def source_map_of(marked: str) -> SourceMap:
    text = marked.replace(MARK, "")
    text_format.Parse(text, ModelConfig())
    return SourceMap(text, ModelConfig.DESCRIPTOR)


def caret(marked: str) -> tuple[int, int]:
    before = marked.split(MARK)[0].split("\n")
    return len(before), len(before[-1]) + 1
