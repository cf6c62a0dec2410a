"""Our schema compared with the one in tritonclient. Both are loaded in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as theirs

from headrace.config import model_config_pb2 as ours

Fact = tuple[Any, ...]


def test_every_message_field_and_enum_value_is_tritons() -> None:
    assert sorted(facts(ours.DESCRIPTOR)) == sorted(facts(theirs.DESCRIPTOR))


def test_the_comparison_covers_the_whole_schema() -> None:
    fields = set(facts(theirs.DESCRIPTOR))
    assert len(fields) > 200
    assert ("ModelConfig", "instance_group", 7, "message", True, "ModelInstanceGroup", "") in fields
    assert ("ModelSequenceBatching.State", "use_growable_memory", 7, "bool", False, "", "") in fields
    assert ("DataType", "TYPE_BF16", 14) in fields


def test_our_package_and_file_are_not_tritons() -> None:
    assert ours.DESCRIPTOR.package == "headrace"
    assert ours.DESCRIPTOR.name == "headrace/config/model_config.proto"
    assert theirs.DESCRIPTOR.package == "inference"


@given(st.integers(0, 2**31 - 1), st.text(max_size=5), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_bytes_mean_the_same_on_both_sides(size: int, name: str, dims: list[int]) -> None:
    config = ours.ModelConfig(name=name, max_batch_size=size)
    config.input.add(name=name, data_type=ours.TYPE_BF16, dims=dims).reshape.SetInParent()
    config.dynamic_batching.priority_queue_policy[3].timeout_action = ours.ModelQueuePolicy.DELAY
    parsed = theirs.ModelConfig.FromString(config.SerializeToString())
    assert parsed.SerializeToString(deterministic=True) == config.SerializeToString(deterministic=True)
    assert list(parsed.input[0].dims) == dims


@pytest.mark.parametrize("name", ["ModelConfig", "ModelInput", "ModelSequenceBatching"])
def test_both_schemas_stay_apart(name: str) -> None:
    assert getattr(ours, name).DESCRIPTOR.full_name == f"headrace.{name}"
    assert getattr(theirs, name).DESCRIPTOR.full_name == f"inference.{name}"


def facts(file: Any) -> Iterator[Fact]:
    """Return every field (message, name, number, type, repeated, its type's name, its oneof) and enum value."""
    for enum in file.enum_types_by_name.values():
        yield from enum_facts(enum)
    for message in file.message_types_by_name.values():
        yield from message_facts(message)


def message_facts(message: Descriptor) -> Iterator[Fact]:
    for field in message.fields:
        kind = field.message_type or field.enum_type
        types = {getattr(field, name): name[5:].lower() for name in dir(field) if name.startswith("TYPE_")}
        oneof = field.containing_oneof.name if field.containing_oneof else ""
        target = short(kind.full_name) if kind is not None else ""
        yield short(message.full_name), field.name, field.number, types[field.type], field.is_repeated, target, oneof
    for enum in message.enum_types:
        yield from enum_facts(enum)
    for nested in message.nested_types:
        yield from message_facts(nested)


def enum_facts(enum: EnumDescriptor) -> Iterator[Fact]:
    for value in enum.values:
        yield short(enum.full_name), value.name, value.number


def short(name: str) -> str:
    return name.partition(".")[2]
