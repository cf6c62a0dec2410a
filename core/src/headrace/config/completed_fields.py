"""The set fields of a config, and one that was completed: for ``headrace check`` and the log."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from headrace.config.model_config_pb2 import ModelConfig


@dataclass(frozen=True, slots=True)
class CompletedField:
    """``source`` set ``field`` (a path such as ``input[0].dims``) to ``value``."""

    field: str
    value: str
    source: str


def names_all_tensors(config: ModelConfig) -> bool:
    """True if the config names inputs and outputs. Then none is completed, so that it can say ``max_batch_size: 0``."""
    return bool(config.input or config.batch_input) and bool(config.output)


def is_set(message: Message, path: str) -> bool:
    """True if ``message`` has a value at ``path``. The empty path is the whole message: True."""
    place: Any = message
    for part in _parts(path):
        if isinstance(place, Message):
            place = next((value for field, value in place.ListFields() if field.name == part), None)
            if place is None:
                return False
            continue
        known = part in place if hasattr(place, "keys") else isinstance(part, int) and part < len(place)
        if not known:
            return False
        place = place[part]
    return True


def _parts(path: str) -> Iterator[str | int]:
    """Yield the names, indices and keys of ``path``, which has at most one key in quotes."""
    while path:
        if path[:2] in ("['", '["'):
            end = path.rindex(path[1] + "]") + 1
            yield ast.literal_eval(path[1:end])
            path = path[end + 1 :]
        elif path.startswith("["):
            index, _, path = path[1:].partition("]")
            yield int(index)
        else:
            name = path.removeprefix(".").split(".", 1)[0].split("[", 1)[0]
            yield name
            path = path.removeprefix(".")[len(name) :]
