"""From the ``inputs`` of an infer request to tensors: views on binary data, or data in JSON.

The type rules are those of docs/spec/behaviours.md section 1.3.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import InvalidArgument
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.request import MAX_INPUTS, Undecoded, log_id, too_many_inputs
from headrace.messages.tensor import BytesTensor, Tensor, wire_view
from headrace.off_loop import TooLargeForLoop
from headrace_http.documents import (
    MAX_DEPTH,
    as_array,
    as_object,
    as_string,
    as_unsigned,
    malformed,
    member,
    too_deep,
    wrong_type,
)
from headrace_http.large_documents import Pieces
from headrace_locations.tensor_locations import no_region

_INT64_MAX = 2**63 - 1
_MANY_DIMS = 64
#: More than any model has, and fewer than the maximum of NumPy.
_USUAL_DIMS = 16
#: The Python types of JSON numbers, and the typecodes of arrays that take both.
_REAL, _TYPECODES = frozenset((float, int)), {"FP32": "f", "FP64": "d"}
_SOURCES = ("data", "binary_data_size", "shared_memory_region")


class _UnusualInput(Exception):
    """The general code, which reports errors, must read this input."""


class _InputKind(NamedTuple):
    """The description of an input without its name. ``known`` is None for an unknown data type.

    ``typecode`` is that of an `array.array` for its numbers, if integers and fractions are both valid; else empty.
    """

    datatype: str
    known: DataType | None
    shape: tuple[int, ...]
    size: int
    typecode: str = ""


def read_inputs(
    entries: Any, model: str, request_id: str, body: memoryview, position: int, max_bytes: int, loop_limit_bytes: int
) -> dict[str, Tensor | Undecoded]:
    """Return the inputs of a request to ``model``. Binary tensors are views on ``body``, from ``position`` on, in
    order.

    ``max_bytes`` limits a tensor in JSON. Raises `InvalidArgument` with Triton's texts, and `TooLargeForLoop` for
    strings of more than ``loop_limit_bytes``.
    """
    inputs: dict[str, Tensor | Undecoded] = {}
    if type(entries) is not list:
        as_array(entries, "inputs")
    if len(entries) > MAX_INPUTS:
        raise too_many_inputs(len(entries))
    for entry in entries:
        try:
            name, datatype, dims = entry["name"], entry["datatype"], entry["shape"]
            if type(name) is not str or type(dims) is not list or len(dims) > _USUAL_DIMS:
                raise _UnusualInput
            kind = _usual_kind(datatype, *dims)
        except (KeyError, TypeError, _UnusualInput):
            name, datatype, shape = _head(entry)
            kind = None
        if name in inputs:
            raise InvalidArgument(f"{log_id(request_id)}input '{name}' already exists in request")
        if kind is None:
            kind = _InputKind(datatype, dtypes.BY_NAME.get(datatype), shape, _count(name, shape, datatype))
        size = None if "data" in entry and "parameters" not in entry else _binary_size(entry)
        if size is None:
            inputs[name] = _from_json(entry["data"], name, kind, max_bytes)
            continue
        end = position + size
        if end > body.nbytes:
            raise InvalidArgument(
                f"unexpected size for input '{name}', expecting {end - body.nbytes} additional bytes for model "
                f"'{model}'"
            )
        if size > loop_limit_bytes and kind.known is dtypes.BYTES:
            raise TooLargeForLoop
        inputs[name] = view(body, position, end, kind.datatype, kind.shape, kind.size)
        position = end
    if position != body.nbytes:
        raise InvalidArgument(f"unexpected additional input data for model '{model}'")
    return inputs


def view(
    body: memoryview, begin: int, end: int, datatype: str, shape: tuple[int, ...], count: int
) -> Tensor | Undecoded:
    """Return ``body[begin:end]`` as a tensor that shares its memory."""
    known = dtypes.BY_NAME.get(datatype)
    if known is dtypes.BYTES:
        return BytesTensor(body[begin:end], shape)
    if known is None or count * known.itemsize != end - begin:
        return Undecoded(datatype, shape, body[begin:end])
    try:
        viewed: Tensor = np.ndarray(shape, known.numpy, body, begin) if count else np.empty(shape, known.numpy)
    except ValueError:  # more axes than NumPy has, or zero elements in absurd dims
        return Undecoded(datatype, shape, body[begin:end])
    return viewed


@lru_cache(2048, typed=True)  # typed: True equals 1 and is not a dim
def _usual_kind(datatype: str, *dims: int) -> _InputKind:
    """Return the kind of a usual input. Raises `_UnusualInput`."""
    known = dtypes.BY_NAME.get(datatype)
    if known is None or any(type(dim) is not int or not 0 <= dim <= _INT64_MAX for dim in dims):
        raise _UnusualInput
    count = prod(dims)
    if count * known.itemsize > _INT64_MAX:
        raise _UnusualInput
    return _InputKind(datatype, known, dims, count, _TYPECODES.get(datatype, "") if dims and count else "")


def _head(entry: Any) -> tuple[str, str, tuple[int, ...]]:
    try:
        name, datatype, shape = entry["name"], entry["datatype"], entry["shape"]
    except (KeyError, TypeError):
        entry = as_object(entry, "inputs")
        name, datatype, shape = member(entry, "name"), member(entry, "datatype"), member(entry, "shape")
    as_string(name, "name")
    as_string(datatype, "datatype")
    for dim in as_array(shape, "shape"):
        as_unsigned(dim, "shape")
    return name, datatype, tuple(shape)


def _count(name: str, shape: tuple[int, ...], datatype: str) -> int:
    """Return the number of elements. Raises if int64 cannot hold it, or the bytes."""
    count = prod(shape) if len(shape) < _MANY_DIMS else _bounded_product(shape)
    if count > _INT64_MAX:
        printed = ",".join(map(str, shape))
        raise InvalidArgument(
            f"invalid shape for input '{name}': shape [{printed}] causes total element count to exceed maximum "
            f"size of {_INT64_MAX}"
        )
    known = dtypes.BY_NAME.get(datatype)
    if known is not None and count * known.itemsize > _INT64_MAX:
        raise InvalidArgument(
            f"byte size overflow for input '{name}': element count ({count}) * data type size ({known.itemsize}) "
            f"exceeds maximum allowed size ({_INT64_MAX})"
        )
    return count


def _bounded_product(shape: tuple[int, ...]) -> int:
    """Return the product of ``shape``, or a number beyond int64: `prod` takes minutes for a million dims."""
    if 0 in shape:
        return 0
    count = 1
    for dim in shape:
        count *= dim
        if count > _INT64_MAX:
            break
    return count


def _binary_size(entry: dict[str, Any]) -> int | None:
    """Return ``binary_data_size``, or None for data in JSON. Raises unless there is exactly one source."""
    parameters = entry.get("parameters")
    if type(parameters) is dict and len(parameters) == 1 and "data" not in entry:
        size = parameters.get("binary_data_size")
        if type(size) is int and size >= 0:
            return size  # the usual case
    if not parameters:
        if "data" in entry:
            return None
        raise not_one_source(())
    given = [name for name in _SOURCES if name in (entry if name == "data" else as_object(parameters, "parameters"))]
    if len(given) != 1:
        raise not_one_source(given)
    if given[0] == "shared_memory_region":
        raise no_region(as_string(parameters["shared_memory_region"], "shared_memory_region"))
    return as_unsigned(parameters["binary_data_size"], "binary_data_size") if given[0] != "data" else None


def not_one_source(given: Sequence[str], locations: Sequence[str] = ()) -> InvalidArgument:
    """Return the error for an input with the sources ``given``, which are none or several.

    ``locations`` are the parameters of tensor locations that Triton does not have.
    """
    more = "".join(f", '{name}' in 'parameters'" for name in locations)
    found = "But set " + " ".join(f"'{name}'" for name in given) if given else "But no field is set"
    return InvalidArgument(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'{more}. {found}"
    )


def _from_json(data: Any, name: str, kind: _InputKind, max_bytes: int) -> Tensor | Undecoded:
    datatype, known, shape, count, typecode = kind
    if known is None:
        raise InvalidArgument(f"invalid datatype for input {name}")
    if (
        typecode
        and type(data) is list
        and len(data) == count
        and _REAL.issuperset(map(type, data))
        and count * known.itemsize <= max_bytes
    ):
        try:
            # An array rounds as a C cast does; NumPy would warn about values that become infinite.
            numbers: Tensor = np.ndarray(shape, known.numpy, array(typecode, data))
        except OverflowError:
            raise _wrong_leaf("f") from None
        return numbers
    if not count or not shape:  # no data is read; the signature refuses an input without a shape
        if type(data) is Pieces:
            data.check()
        return view(memoryview(b""), 0, 0, datatype, shape, count)
    if type(data) is not list and type(data) is not Pieces:
        raise wrong_type("data", "array", "array")
    if known is dtypes.FP16 or known is dtypes.BF16:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}"
        )
    if count * known.itemsize > max_bytes:
        raise InvalidArgument(
            f"JSON input '{name}' has a byte_size ({count * known.itemsize} bytes) that exceeds the maximum allowed "
            f"value of {max_bytes} bytes. Use --http-max-input-size to increase the limit."
        )
    return _to_tensor(data, known, shape, count)


def _to_tensor(
    leaves: list[Any] | Pieces, datatype: DataType, shape: tuple[int, ...], count: int
) -> Tensor | Undecoded:
    """Return ``leaves`` as a tensor of ``count`` elements in ``shape``. Copies once.

    ``leaves`` may be nested to any depth below `MAX_DEPTH`. It is read in row-major order, and only the number of its
    elements must fit the shape. Raises `InvalidArgument` with Triton's texts.
    """
    if isinstance(leaves, Pieces):
        return _assembled(leaves, datatype, shape, count)
    kinds = set(map(type, leaves))
    if list in kinds:
        leaves = _flatten(leaves)
        kinds = set(map(type, leaves))
    if datatype is dtypes.BYTES:  # the signature compares the number of strings with the shape
        return BytesTensor.from_items(_strings(leaves, kinds), shape)
    if len(leaves) != count:
        raise _wrong_count(leaves, count, datatype)
    return _shaped(_numbers(leaves, kinds, datatype), datatype, shape)


def _assembled(pieces: Pieces, datatype: DataType, shape: tuple[int, ...], count: int) -> Tensor | Undecoded:
    """Return the tensor of the elements in ``pieces``, one piece in memory at a time."""
    is_text, found = datatype is dtypes.BYTES, 0
    parts = list[Any]()
    numbers = np.empty(0 if is_text else count, datatype.numpy)
    for leaves in pieces.read():
        begin, found = found, found + len(leaves)
        kinds = set(map(type, leaves))
        if is_text:
            parts.append(BytesTensor.from_items(_strings(leaves, kinds), (len(leaves),)).buffer)
        elif found > count:
            raise _wrong_count(leaves, count - begin, datatype)
        else:
            numbers[begin:found] = _numbers(leaves, kinds, datatype)
    if found != count and not is_text:
        raise _wrong_count([], count, datatype)
    return BytesTensor(b"".join(parts), shape) if is_text else _shaped(numbers, datatype, shape)


def _shaped(numbers: np.ndarray[Any, np.dtype[Any]], datatype: DataType, shape: tuple[int, ...]) -> Tensor | Undecoded:
    try:
        return numbers.reshape(shape)
    except ValueError:  # more axes than NumPy has
        return Undecoded(datatype.name, shape, wire_view(numbers))


def _numbers(leaves: list[Any], kinds: set[type], datatype: DataType) -> np.ndarray[Any, np.dtype[Any]]:
    kind = datatype.numpy.kind
    try:
        if kind == "f" and kinds <= _REAL:
            return np.frombuffer(array(_TYPECODES[datatype.name], leaves), datatype.numpy)
        if kind == "i" and kinds == {int}:
            return np.array(leaves, np.int64).astype(datatype.numpy, copy=False)
        if kind == "u" and kinds == {int} and min(leaves) >= 0:  # NumPy 1 would wrap a negative number
            return np.array(leaves, np.uint64).astype(datatype.numpy, copy=False)
    except OverflowError:
        raise _wrong_leaf(kind) from None
    if kind == "b" and kinds == {bool}:
        return np.array(leaves, np.bool_)
    raise _wrong_leaf(kind)


def _strings(leaves: list[Any], kinds: set[type]) -> list[bytes]:
    if not kinds <= {str}:
        raise malformed("Unable to parse JSON bytes array: attempt to access JSON non-string as string")
    return [leaf.encode("utf-8", "surrogatepass") for leaf in leaves]


def _flatten(nested: list[Any]) -> list[Any]:
    """Return the elements in row-major order, in linear time."""
    level, depth = nested, 1
    while (kinds := set(map(type, level))) == {list}:
        depth += 1
        if depth >= MAX_DEPTH:
            raise too_deep()
        level = list(chain.from_iterable(level))
    return list(_walk(level, depth)) if list in kinds else level


def _walk(nested: list[Any], depth: int) -> Iterator[Any]:
    """Yield the elements of irregularly nested data, depth first."""
    pending = [iter(nested)]
    while pending:
        for item in pending[-1]:
            if type(item) is list:
                pending.append(iter(item))
                break
            yield item
        else:
            pending.pop()
        if depth + len(pending) > MAX_DEPTH:
            raise too_deep()


def _wrong_count(leaves: list[Any], count: int, datatype: DataType) -> InvalidArgument:
    """Return the error for too many or too few ``leaves``. Raises if one of the first ``count`` is of a wrong type."""
    if leaves := leaves[:count]:
        _numbers(leaves, set(map(type, leaves)), datatype)
    return malformed("Unable to parse 'data': Shape does not match true shape of 'data' field")


def _wrong_leaf(kind: str) -> InvalidArgument:
    name = {"b": "boolean", "u": "unsigned-integer", "i": "signed-integer"}.get(kind)
    return wrong_type("data", name, name) if name else wrong_type("data", "number", "double")
