"""From the JSON object of a generate request to an infer request.

A member with the name of an input is that input, and any other member is a parameter. ``parameters`` is an object whose
members are read the same way. ``id`` and the members about sequences have their meaning as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from headrace import Code, HeadraceError, HttpCall, InferRequest, InvalidArgument, ModelView, Tensor

_NESTED = "parameters"
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


def read_request(call: HttpCall, document: Any, name: str, version: str, model: ModelView) -> InferRequest:
    """Return the request to ``model`` in ``document``. Raises `InvalidArgument`, in Triton's words."""
    if _NESTED in model.inputs:
        raise InvalidArgument(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
    if type(document) is not dict:
        raise InvalidArgument("attempt to get members for non-object", Code.INTERNAL)
    request_id = call.read_member(document, "id", str, "")
    inputs: dict[str, Tensor] = {}
    given: dict[str, Any] = {}
    parameters: dict[str, str | int | bool | float] = {}

    def read(members: dict[str, Any]) -> None:
        for key, value in members.items():
            if key in model.inputs:
                if key in inputs:
                    raise InvalidArgument(f"input '{key}' already exists in request")
                inputs[key] = _input(call, key, value, model)
            else:
                given[key], parameters[key] = value, call.read_parameter(value, key)

    nested = document.pop(_NESTED, {})
    read(document)
    if type(nested) is not dict:
        raise InvalidArgument(
            f"Expected JSON object for keyword: '{_NESTED}': attempt to access JSON non-object as object",
            Code.INTERNAL,
        )
    try:
        read(nested)
    except HeadraceError as error:
        raise InvalidArgument(f"Converting keyword: '{_NESTED}': {error.message}", error.code) from None
    sequence = call.read_parameters({key: given[key] for key in _SEQUENCE if key in given})
    return InferRequest(
        name,
        inputs,
        id=request_id,
        model_version=version,
        parameters=parameters,
        sequence_id=sequence.sequence_id,
        sequence_start=sequence.sequence_start,
        sequence_end=sequence.sequence_end,
    )


def _input(call: HttpCall, name: str, value: Any, model: ModelView) -> Tensor:
    spec = model.inputs[name]
    values = value if type(value) is list else [value]
    dims = (-1, *spec.dims) if model.max_batch_size > 0 else spec.dims
    count = _count_strings(values) if spec.datatype.name == "BYTES" else len(values)
    return call.read_tensor(name, spec.datatype.name, _shape(name, dims, count), values)


def _count_strings(values: list[Any]) -> int:
    """Return how many strings there are in ``values``, which may be nested. Linear time."""
    count = 0
    while values:
        nested = [each for each in values if type(each) is list]
        count += len(values) - len(nested)
        values = [inner for each in nested for inner in each]
    return count


def _shape(name: str, dims: Sequence[int], count: int) -> list[int]:
    """Return the shape of ``count`` elements: the last dim of -1 takes what the others leave, and these become 1."""
    known = prod(dim for dim in dims if dim >= 0)
    shape = [max(dim, 1) for dim in dims] if known else list(dims)
    rest, left = divmod(count, known) if known else (0, count)
    free = [place for place, dim in enumerate(dims) if dim < 0]
    if free:
        shape[free[-1]] = rest
    if left or (not free and known and rest != 1):
        raise InvalidArgument(f"The schema can not convert input '{name}' to tensor with proper shape")
    return shape
