"""Enum values: protobuf takes any number for one, because its third version has open enums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from headrace.config.validation.problem import Problem


def check(message: Message, prefix: str = "") -> Iterator[Problem]:
    """A problem for every enum field, at any depth, that holds a number without a name."""
    for field, value in message.ListFields():
        path = f"{prefix}{field.name}"
        if field.enum_type is not None:
            names = field.enum_type.values_by_number
            if value not in names:
                known = ", ".join(names[number].name for number in sorted(names))
                yield Problem(path, f"{path} is {value}, expected one of {known}")
        else:
            for key, item in _messages(field, value):
                yield from check(item, f"{path}{key}.")


def _messages(field: FieldDescriptor, value: Any) -> Iterator[tuple[str, Message]]:
    """The messages that a field holds, each with what follows the field's name in its path."""
    if field.message_type is None:
        return
    if isinstance(value, Message):
        yield "", value
    elif not field.message_type.GetOptions().map_entry:
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif field.message_type.fields_by_name["value"].message_type is not None:
        yield from ((f"[{key!r}]", value[key]) for key in sorted(value))
