"""Paths of fields, such as ``input[0].dims`` or ``parameters['x']``, looked up in a config."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message


def is_set(message: Message, path: str) -> bool:
    """Whether ``message`` says anything at ``path``; True for the empty path, which is all of it."""
    place: Any = message
    for part in _parts(path):
        if isinstance(place, Message):
            place = {field.name: value for field, value in place.ListFields()}
        known = part in place if hasattr(place, "keys") else isinstance(part, int) and part < len(place)
        if not known:
            return False
        place = place[part]
    return True


def _parts(path: str) -> Iterator[str | int]:
    """The names, indices and keys of ``path``, which has one key in quotes at the most."""
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
