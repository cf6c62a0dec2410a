"""The differences between two answers, two tensors or two documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import Any

import numpy as np

from headrace_compare.answers import ServerAnswer
from headrace_compare.named_tensors import NamedTensor

#: Relative and absolute tolerance by datatype; every other datatype is compared exactly.
TOLERANCES = {"FP64": (1e-7, 1e-9), "FP32": (1e-5, 1e-6), "FP16": (1e-3, 1e-3), "BF16": (1e-2, 1e-2)}
#: The value of a missing field or entry.
ABSENT, NOTHING = "absent", "-"
#: Fields of a server's metadata that name the server itself.
IDENTITY = ("name", "version")


@dataclass(frozen=True, slots=True)
class AnswerDifference:
    """One difference: its ``kind``, such as "status" or "values", its ``field``, and the value of each server."""

    kind: str
    field: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Tolerances:
    """``rtol`` and ``atol`` replace those of the datatype, if they are given."""

    rtol: float | None = None
    atol: float | None = None

    def of(self, datatype: str) -> tuple[float, float]:
        """Return the relative and the absolute tolerance of a datatype with fractions."""
        rtol, atol = TOLERANCES[datatype]
        return rtol if self.rtol is None else self.rtol, atol if self.atol is None else self.atol


def compare_streams(
    first: Sequence[ServerAnswer], second: Sequence[ServerAnswer], tolerances: Tolerances, *, same_protocol: bool
) -> Iterator[AnswerDifference]:
    """Yield the differences between all answers to one request."""
    if len(first) != len(second):
        yield AnswerDifference("responses", "number of responses", str(len(first)), str(len(second)))
    for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
        at = f"response {number}: " if len(first) > 1 else ""
        yield from compare_answers(one, other, tolerances, at, same_protocol=same_protocol)


def compare_answers(
    first: ServerAnswer, second: ServerAnswer, tolerances: Tolerances, at: str = "", *, same_protocol: bool
) -> Iterator[AnswerDifference]:
    """Yield the differences between two answers. Status and headers are of one protocol, and compared within it."""
    if same_protocol and first.status != second.status:
        yield AnswerDifference("status", f"{at}status", first.status, second.status)
    if first.error != second.error:
        yield AnswerDifference("error text", f"{at}error", first.error or "no error", second.error or "no error")
    if first.error or second.error:
        return
    names = [each.name for each in first.outputs], [each.name for each in second.outputs]
    if names[0] != names[1]:
        yield AnswerDifference("outputs", f"{at}names of outputs", ", ".join(names[0]), ", ".join(names[1]))
    others = {each.name: each for each in second.outputs}
    for tensor in first.outputs:
        if tensor.name in others:
            yield from compare_tensors(tensor, others[tensor.name], tolerances, at)
    yield from compare_documents(first.fields, second.fields, "response", at)
    if same_protocol:
        yield from compare_documents(first.headers, second.headers, "headers", f"{at}header ")


def compare_tensors(
    first: NamedTensor, second: NamedTensor, tolerances: Tolerances, at: str = ""
) -> Iterator[AnswerDifference]:
    """Yield the differences between two outputs: of values, the first element that differs and the largest."""
    name = f"{at}output '{first.name}'"
    if first.datatype != second.datatype:
        yield AnswerDifference("datatype", f"{name}: datatype", first.datatype, second.datatype)
        return
    if first.shape != second.shape or len(first.values) != len(second.values):
        yield AnswerDifference("shape", f"{name}: shape", _shape(first), _shape(second))
        return
    differs, note = _unequal(first, second, tolerances)
    places = np.flatnonzero(differs)
    if len(places):
        at_first = places[0]
        where = f"{name}{_index(at_first, first.shape)}, first of {len(places)} in {len(first.values)}{note}"
        yield AnswerDifference("values", where, _shown(first.values[at_first]), _shown(second.values[at_first]))


def _unequal(first: NamedTensor, second: NamedTensor, tolerances: Tolerances) -> tuple[np.ndarray[Any, Any], str]:
    """Return the mask of the elements that differ, and a note on the largest difference."""
    if first.datatype not in TOLERANCES:
        return first.values != second.values, ""
    rtol, atol = tolerances.of(first.datatype)
    one, other = first.values.astype(np.float64), second.values.astype(np.float64)
    differs = ~np.isclose(one, other, rtol=rtol, atol=atol, equal_nan=True)
    with np.errstate(invalid="ignore"):
        sizes = np.where(differs, np.abs(one - other), 0.0)
    sizes = np.where(np.isnan(sizes), np.inf, sizes)
    if not differs.any():
        return differs, ""
    largest = int(np.argmax(sizes))
    return differs, f"; largest {sizes[largest]:.3g} at {_index(largest, first.shape)}"


def compare_documents(first: Any, second: Any, kind: str, at: str = "") -> Iterator[AnswerDifference]:
    """Yield each field in which two JSON documents differ. Lists are compared in order."""
    stack = [(at, first, second)]
    while stack:
        place, one, other = stack.pop()
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            keys = dict.fromkeys([*one, *other])
            dot = "" if not place or place.endswith(" ") else "."
            children = [(f"{place}{dot}{key}", one.get(key, _ABSENT), other.get(key, _ABSENT)) for key in keys]
            stack += reversed(children)
        elif isinstance(one, list) and isinstance(other, list):
            pairs = zip_longest(one, other, fillvalue=_ABSENT)
            stack += reversed([(f"{place}[{number}]", *pair) for number, pair in enumerate(pairs)])
        elif one != other or (type(one) is not type(other) and bool in (type(one), type(other))):
            yield AnswerDifference(kind, place, _shown(one), _shown(other))


def shape_of(document: Any, at: str = "") -> set[str]:
    """Return the paths of all fields of a JSON document, without values: ``model_stats[].inference_count``."""
    if isinstance(document, Mapping):
        return {path for key, value in document.items() for path in shape_of(value, f"{at}.{key}" if at else key)}
    if isinstance(document, list):
        return {path for value in document for path in shape_of(value, f"{at}[]")}
    return {at}


class _Absent:
    def __repr__(self) -> str:
        return ABSENT


_ABSENT = _Absent()


def _shape(tensor: NamedTensor) -> str:
    note = "" if tensor.is_whole else f" with {len(tensor.values)} values"
    return f"{list(tensor.shape)}{note}"


def _index(place: int | np.intp, shape: tuple[int, ...]) -> str:
    if not shape:
        return ""
    is_inside = int(place) < prod(shape)
    return str([int(each) for each in np.unravel_index(int(place), shape)] if is_inside else [int(place)])


def _shown(value: Any, limit: int = 120) -> str:
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
