"""Which fields of a config were completed, and with what: for ``penstock check`` and the log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf import text_format
from google.protobuf.message import Message

from penstock.config.model_config_pb2 import ModelConfig


@dataclass(frozen=True, slots=True)
class Completion:
    """``field`` (a path such as ``input[0].dims``) was given ``value`` by ``source``."""

    field: str
    value: str
    source: str


def completions(before: ModelConfig, after: ModelConfig, source: str) -> list[Completion]:
    """What ``after`` says and ``before`` does not, in schema order."""
    return [Completion(field, value, source) for field, value in _differences(before, after, "")]


def _differences(before: Message, after: Message, prefix: str) -> Iterator[tuple[str, str]]:
    known = {descriptor.name: value for descriptor, value in before.ListFields()}
    for descriptor, value in after.ListFields():
        path = f"{prefix}{descriptor.name}"
        old = known.get(descriptor.name)
        if old == value:
            continue
        is_message = descriptor.message_type is not None
        is_map = is_message and descriptor.message_type.GetOptions().map_entry
        if is_message and descriptor.is_repeated and not is_map:
            yield from _in_list(old or (), value, path)
        elif is_message and not descriptor.is_repeated and value.ListFields():
            yield from _differences(old if old is not None else type(value)(), value, f"{path}.")
        else:
            yield path, _text(descriptor, value)


def _in_list(before: Any, after: Any, path: str) -> Iterator[tuple[str, str]]:
    for index, item in enumerate(after):
        if index < len(before):
            yield from _differences(before[index], item, f"{path}[{index}].")
        else:
            yield f"{path}[{index}]", text_format.MessageToString(item, as_one_line=True)


def _text(descriptor: Any, value: Any) -> str:
    if descriptor.enum_type is not None and not descriptor.is_repeated:
        return str(descriptor.enum_type.values_by_number[value].name)
    if isinstance(value, Message):
        return "{ }"
    return str(list(value)) if descriptor.is_repeated else str(value)
