"""Lists the fields of a config that were completed, and their values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from headrace.config.completed_fields import CompletedField
from headrace.config.model_config_pb2 import ModelConfig


def completed_fields(before: ModelConfig, after: ModelConfig, source: str) -> list[CompletedField]:
    """Return the fields of ``after`` that are absent or different in ``before``, in schema order."""
    return [CompletedField(field, value, source) for field, value in _differences(before, after, "")]


def _differences(before: Message, after: Message, prefix: str) -> Iterator[tuple[str, str]]:
    for field, value in after.ListFields():
        old = getattr(before, field.name)
        path = f"{prefix}{field.name}"
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield from _in_map(old, value, path)
        elif field.message_type is not None and field.is_repeated:
            yield from _in_list(old, value, path)
        elif field.message_type is not None:
            yield from _in_message(old, value, path, before.HasField(field.name))
        elif old != value:
            yield path, _text(field, value)


def _in_message(before: Message, after: Message, path: str, was_set: bool) -> Iterator[tuple[str, str]]:
    if after.ListFields():
        yield from _differences(before, after, f"{path}.")
    elif not was_set:
        yield path, "{ }"


def _in_list(before: Sequence[Message], after: Sequence[Message], path: str) -> Iterator[tuple[str, str]]:
    for index, item in enumerate(after):
        if index < len(before):
            yield from _differences(before[index], item, f"{path}[{index}].")
        else:
            yield f"{path}[{index}]", text_format.MessageToString(item, as_one_line=True)


def _in_map(before: Mapping[Any, Any], after: Mapping[Any, Any], path: str) -> Iterator[tuple[str, str]]:
    for key in sorted(after):
        value = after[key]
        if key not in before or before[key] != value:
            text = text_format.MessageToString(value, as_one_line=True) if isinstance(value, Message) else str(value)
            yield f"{path}[{key!r}]", text


def _text(field: FieldDescriptor, value: Any) -> str:
    if field.is_repeated:
        return str(list(value))
    return str(field.enum_type.values_by_number[value].name) if field.enum_type is not None else str(value)
