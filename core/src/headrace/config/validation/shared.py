"""The `Problem` that all checks yield, and the rules of enum values, shapes and sizes that several checks use.

Python's integers are unbounded, so no size overflows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import Code
from headrace.messages import dtypes


@dataclass(frozen=True, slots=True)
class Problem:
    """A broken rule. ``field`` is a path such as ``input[0].dims``; ``message`` is Triton's text if it has one."""

    field: str
    message: str
    code: Code = Code.INVALID_ARGUMENT


#: The most axes that NumPy 1.26 supports, the oldest version that Headrace runs with.
MAX_RANK = 32
#: The most elements, and bytes, of a tensor: the largest signed 64-bit integer.
MAX_SIZE = 2**63 - 1
#: The largest tensor that the server itself generates: warm-up data, initial states.
MAX_MADE_BYTES = 4 * 2**30
#: The size of the length in front of each element of BYTES.
_LENGTH_BYTES = 4


def size_in_bytes(dims: Sequence[int], data_type: int) -> int:
    """Return the smallest size of a tensor in bytes: variable dims count as 1. ``data_type`` is a config value other
    than 0."""
    return _elements(dims) * (dtypes.BY_CONFIG_VALUE[data_type].itemsize or _LENGTH_BYTES)


def check_shape(field: str, name: str, dims: Sequence[int], data_type: int, suffix: str) -> Iterator[Problem]:
    """Check the rank, the element count and the byte size of tensor ``name``. ``suffix`` names the model."""
    if len(dims) > MAX_RANK:
        yield Problem(field, f"tensor '{name}' has {len(dims)} dims, the limit is {MAX_RANK}{suffix}")
    elif _elements(dims) > MAX_SIZE:
        yield Problem(field, f"element count for tensor '{name}' exceeds maximum size of {MAX_SIZE}{suffix}")
    elif data_type and size_in_bytes(dims, data_type) > MAX_SIZE:
        yield Problem(field, f"byte size for tensor '{name}' exceeds maximum size of {MAX_SIZE}{suffix}")


def check_preferred_sizes(field: str, title: str, sizes: Sequence[int], config: ModelConfig) -> Iterator[Problem]:
    """Check that each preferred size is from 1 to the maximum batch size. ``title`` starts the message."""
    for index, size in enumerate(sizes):
        if size <= 0:
            yield Problem(f"{field}[{index}]", f"{title} must be positive for {config.name}")
        elif size > config.max_batch_size:
            yield Problem(f"{field}[{index}]", f"{title} must be <= max batch size for {config.name}")


def invalid_dimension(name: str, dims: Sequence[int]) -> str:
    """Return the text for a negative dim that is not -1 (docs/spec/behaviours.md section 3.2)."""
    return f"tensor '{name}' contains an invalid dimension in shape [{','.join(map(str, dims))}]"


def _elements(dims: Sequence[int]) -> int:
    return prod(dim for dim in dims if dim >= 0)


def check_enums(message: Message, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for every enum field, at any depth, whose number is no value of the enum."""
    for field, value in message.ListFields():
        names = _enum_names(field)
        if names is None:
            continue
        path = f"{prefix}{field.name}"
        if not names:
            for key, item in _messages(field, value):
                yield from check_enums(item, f"{path}{key}.")
        elif value not in names:
            known = ", ".join(names[number] for number in sorted(names))
            yield Problem(path, f"{path} is {value}, expected one of {known}")


@cache
def _enum_names(field: FieldDescriptor) -> Mapping[int, str] | None:
    """Return the names of an enum's values by number; none for a message that may have enums; None for other fields."""
    if field.enum_type is not None:
        return {number: value.name for number, value in field.enum_type.values_by_number.items()}
    return {} if field.message_type is not None and _has_enums(field.message_type, ()) else None


def _has_enums(message: Descriptor, above: tuple[Descriptor, ...]) -> bool:
    """True if a field of ``message``, at any depth, is an enum. ``above`` are the messages around it."""
    around = (*above, message)
    for field in message.fields:
        below = field.message_type
        if field.enum_type is not None or (below is not None and below not in around and _has_enums(below, around)):
            return True
    return False


def _messages(field: FieldDescriptor, value: Any) -> Iterator[tuple[str, Message]]:
    """Yield the messages in a field, each with the part of its path that follows the name of the field."""
    assert field.message_type is not None
    if isinstance(value, Message):
        yield "", value
    elif not field.message_type.GetOptions().map_entry:
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif field.message_type.fields_by_name["value"].message_type is not None:
        yield from ((f"[{key!r}]", value[key]) for key in sorted(value))
