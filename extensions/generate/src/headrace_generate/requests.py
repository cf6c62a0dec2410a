"""From the JSON object of a generate request to an infer request.

A member with the name of an input is that input, and any other member is a parameter. ``parameters`` is an object whose
members are read the same way. ``id`` and the members about sequences have their meaning as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from headrace import Code, HeadraceError, HttpCall, InferRequest, InvalidArgument, ModelView, Tensor, Unsupported

_NESTED = "parameters"
_RESERVED = "triton_"
_INT64_MIN, _INT64_MAX, _UINT64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
_MAX_SEQUENCE_ID_BYTES = 128


def read_request(call: HttpCall, document: Any, name: str, version: str, model: ModelView) -> InferRequest:
    """Return the request to ``model`` in ``document``. Raises `InvalidArgument`, in Triton's words."""
    if _NESTED in model.inputs:
        raise InvalidArgument(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
    if type(document) is not dict:
        raise InvalidArgument("attempt to get members for non-object", Code.INTERNAL)
    request_id = _typed(document, "id", str, "string", "")
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
                given[key], parameters[key] = value, _parameter(key, value)

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
    return InferRequest(
        name,
        inputs,
        id=request_id,
        model_version=version,
        parameters=parameters,
        sequence_id=_sequence_id(given),
        sequence_start=_typed(given, "sequence_start", bool, "boolean", False),
        sequence_end=_typed(given, "sequence_end", bool, "boolean", False),
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


def _parameter(name: str, value: Any) -> str | int | bool | float:
    if name.startswith(_RESERVED):
        raise InvalidArgument(
            f"parameter keys starting with '{_RESERVED}' are reserved for Triton usage and should not be specified."
        )
    if type(value) is int:
        return value if _INT64_MIN <= value <= _INT64_MAX else float(value)
    if type(value) in (str, bool, float):
        return value  # type: ignore[no-any-return]
    raise InvalidArgument(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _sequence_id(given: dict[str, Any]) -> int | str:
    value = given.get("sequence_id", 0)
    if type(value) is int and 0 <= value <= _UINT64_MAX:
        return value
    if type(value) is not str:
        raise _wrong_type("sequence_id", "string")
    if len(value.encode(errors="replace")) > _MAX_SEQUENCE_ID_BYTES:
        raise Unsupported(f"string correlation ID cannot be longer than {_MAX_SEQUENCE_ID_BYTES} characters")
    return value


def _typed(members: dict[str, Any], name: str, kind: type, word: str, default: Any) -> Any:
    value = members.get(name, default)
    if type(value) is not kind:
        raise _wrong_type(name, word)
    return value


def _wrong_type(name: str, word: str) -> InvalidArgument:
    return InvalidArgument(f"Unable to parse '{name}': attempt to access JSON non-{word} as {word}", Code.INTERNAL)
