from __future__ import annotations

from google.protobuf import text_format

from headrace.config.completed_fields import CompletedField
from headrace.config.model_config_pb2 import ModelConfig
from headrace_cli.inspection.config_differences import completed_fields

BEFORE = """
    max_batch_size: 4
    input [ { name: "a" } ]
    optimization { graph { level: 1 } }
    parameters { key: "p" value { string_value: "v" } }
    metric_tags { key: "t" value: "u" }
"""
AFTER = """
    max_batch_size: 8 backend: "onnxruntime"
    version_policy { latest { num_versions: 1 } }
    input [ { name: "a" data_type: TYPE_FP32 dims: [ -1, 3 ] }, { name: "b" } ]
    optimization { graph { level: 1 } input_pinned_memory { enable: true } }
    dynamic_batching { }
    instance_group { kind: KIND_CPU }
    parameters { key: "p" value { string_value: "v" } }
    parameters { key: "q" value { string_value: "w" } }
    metric_tags { key: "t" value: "new" }
"""


def parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def test_every_change_is_listed_with_its_path_its_value_and_its_author() -> None:
    differences = completed_fields(parsed(BEFORE), parsed(AFTER), "backend")
    assert {(entry.field, entry.value) for entry in differences} == {
        ("backend", "onnxruntime"),
        ("version_policy.latest.num_versions", "1"),
        ("max_batch_size", "8"),
        ("input[0].data_type", "TYPE_FP32"),
        ("input[0].dims", "[-1, 3]"),
        ("input[1]", 'name: "b"'),
        ("optimization.input_pinned_memory.enable", "True"),
        ("dynamic_batching", "{ }"),
        ("instance_group[0]", "kind: KIND_CPU"),
        ("parameters['q']", 'string_value: "w"'),
        ("metric_tags['t']", "new"),
    }
    assert {entry.source for entry in differences} == {"backend"}


def test_nothing_is_listed_where_nothing_changed() -> None:
    assert completed_fields(parsed(AFTER), parsed(AFTER), "backend") == []


def test_comparing_changes_neither_config() -> None:
    before, after = parsed(BEFORE), parsed(AFTER)
    completed_fields(before, after, "backend")
    assert (before, after) == (parsed(BEFORE), parsed(AFTER))
    assert not before.HasField("version_policy")


def test_a_choice_that_was_empty_already_is_not_listed() -> None:
    assert completed_fields(parsed("dynamic_batching { }"), parsed("dynamic_batching { }"), "x") == []
    assert completed_fields(parsed(""), parsed("dynamic_batching { }"), "x") == [
        CompletedField("dynamic_batching", "{ }", "x")
    ]
