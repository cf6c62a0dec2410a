"""The ``outputs`` of an infer request: the requested formats, and their encoding as JSON, binary, or top classes.

Source: docs/spec/behaviours.md section 1.3, response.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import isfinite, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import orjson

from headrace.errors import HeadraceError, InvalidArgument, PluginError
from headrace.messages import dtypes
from headrace.messages.response import InferResponse
from headrace.messages.tensor import SMALL_BYTES, BytesTensor, Tensor, data_type, wire_bytes, wire_view
from headrace.off_loop import LARGE_BYTES, UNBOUNDED, TooLargeForLoop, slices
from headrace_hosts.classification import classify
from headrace_http.documents import as_array, as_boolean, as_object, as_string, as_unsigned, member
from headrace_http.message import BINARY_TYPE, HEADER_LENGTH_NAME, JSON_TYPE, Buffer, HttpReply, new_reply
from headrace_locations.tensor_locations import Target, no_region

#: A larger count is an attack or a mistake; Triton's limit on elements is far below.
_MAX_CLASSES = 2**31 - 1
#: ``wbits`` of zlib for the content codings of replies.
_WBITS = {b"gzip": 31, b"deflate": 15}
_NUMPY = orjson.OPT_SERIALIZE_NUMPY
#: From this size on, orjson prints the array itself; below, a list is faster (measured).
_MANY = 128
#: The assumed size of an element, so that a slice takes about 1 ms to print.
_ITEM_BYTES = 8
#: The placeholder of data that is already printed. JSON never contains this byte.
_MARK = b"\0"
_ENCODING = b"Content-Encoding"
#: The names of data types that are printed as NumPy returns them.
_PRINTED = {known.numpy: known.name for known in dtypes.ALL if known not in (dtypes.BYTES, dtypes.FP16, dtypes.BF16)}


class OutputFormat(NamedTuple):
    """The format of an output. ``classes`` above 0 requests that many classes."""

    is_binary: bool
    classes: int = 0


class LocatedOutput(OutputFormat):
    """An output that is not sent: it is written to ``target``. Its ``classes`` are -1."""

    target: Target


JSON = OutputFormat(False)
BINARY = OutputFormat(True)


def read_outputs(entries: Any) -> tuple[list[str], dict[str, OutputFormat]]:
    """Return the requested names, in order and with repetitions, and the format of each."""
    names, formats = [], {}
    for entry in as_array(entries, "outputs"):
        name = as_string(member(as_object(entry, "outputs"), "name"), "name")
        parameters = entry.get("parameters")
        names.append(name)
        formats[name] = JSON if not parameters else _format(name, as_object(parameters, "parameters"))
    return names, formats


def _format(name: str, parameters: dict[str, Any]) -> OutputFormat:
    is_binary = as_boolean(parameters.get("binary_data", False), "binary_data")
    classes = as_unsigned(parameters.get("classification", 0), "classification")
    if "shared_memory_region" in parameters:
        _refuse_shared_memory(parameters, is_binary)
    if classes > _MAX_CLASSES:
        raise InvalidArgument(
            f"'classification' of output '{name}' is {classes}, but at most {_MAX_CLASSES} is allowed"
        )
    return OutputFormat(is_binary, classes) if classes else BINARY if is_binary else JSON


def _refuse_shared_memory(parameters: dict[str, Any], is_binary: bool) -> None:
    region = as_string(parameters["shared_memory_region"], "shared_memory_region")
    if "classification" in parameters:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
    if is_binary:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
    raise no_region(region)


@lru_cache(maxsize=256)
def response_encoding(accepted: bytes) -> bytes:
    """Return ``gzip``, ``deflate`` or ``identity``: the highest weight in an ``Accept-Encoding``.

    Of equal weights, the first counts. An entry with an invalid weight is skipped.
    """
    best, best_weight = b"identity", 0.0
    for entry in accepted.split(b","):
        name, _, weight_text = entry.partition(b";")
        name, weight = name.strip(), _weight(weight_text.strip())
        if name in (b"identity", b"gzip", b"deflate") and weight > best_weight:
            best, best_weight = name, weight
    return best


def encode(
    response: InferResponse,
    formats: Mapping[str, OutputFormat],
    default: OutputFormat,
    labels: Mapping[str, Sequence[str]],
    is_batched: bool,
    encoding: bytes = b"identity",
    loop_limit_bytes: int = UNBOUNDED,
) -> HttpReply:
    """Return the reply to an infer request. Binary tensors are views, not copies, unless compressed.

    ``formats`` and ``default`` are the formats of the outputs; ``labels`` name the classes of an output. Raises
    `InvalidArgument` for an output without a JSON form or classes, and `TooLargeForLoop` if more than
    ``loop_limit_bytes`` must be ranked, printed or compressed.
    """
    if encoding == b"identity" and (formats or default is BINARY):
        reply = _encode_binary(response, formats, default)
        if reply is not None:
            return reply
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    outputs: list[dict[str, Any]] = []
    document["outputs"] = outputs
    parts: list[Buffer] = [b""]
    printed: list[list[bytes]] = []
    for name, tensor in response.outputs.items():
        wanted = formats.get(name, default)
        if wanted is JSON and type(tensor) is np.ndarray and tensor.size < _MANY:  # JSON outputs are usually small
            datatype, values = _PRINTED.get(tensor.dtype), tensor.ravel().tolist()
            if datatype is not None and isfinite(sum(values)):
                outputs.append({"name": name, "datatype": datatype, "shape": tensor.shape, "data": values})
                continue
        if wanted.classes:
            if isinstance(wanted, LocatedOutput):
                wanted.target.write(name, tensor, loop_limit_bytes)
                outputs.append({"name": name, "datatype": data_type(tensor).name, "shape": tensor.shape})
                continue
            if tensor.nbytes > loop_limit_bytes:
                raise TooLargeForLoop
            tensor = classify(tensor, wanted.classes, labels.get(name, ()), is_batched)
        datatype = data_type(tensor).name
        if wanted.is_binary:
            size = tensor.nbytes
            outputs.append(
                {"name": name, "datatype": datatype, "shape": tensor.shape, "parameters": {"binary_data_size": size}}
            )
            if size:
                parts.append(wire_bytes(tensor))
        else:
            data = _data(tensor, datatype, loop_limit_bytes, printed)
            outputs.append({"name": name, "datatype": datatype, "shape": tensor.shape, "data": data})
    try:
        parts[0] = header = orjson.dumps(document, option=_NUMPY)
    except TypeError as error:
        raise _unsendable(response, error) from None
    headers: Sequence[tuple[bytes, bytes]] = JSON_TYPE
    if len(parts) > 1:
        headers = (BINARY_TYPE, (HEADER_LENGTH_NAME, b"%d" % _length(header, printed)))
    if printed:
        parts[:1] = _joined(header, printed)
    if encoding == b"identity":
        return HttpReply(200, headers, parts)
    if sum(map(len, parts)) > loop_limit_bytes:
        raise TooLargeForLoop
    return HttpReply(200, (*headers, (_ENCODING, encoding)), (compressed(parts, encoding),))


def _encode_binary(
    response: InferResponse, formats: Mapping[str, OutputFormat], default: OutputFormat
) -> HttpReply | None:
    """Return the reply if all outputs are binary arrays: then its JSON, except for the id, repeats. Else None."""
    parameters: tuple[tuple[str, Any], ...] = ()
    if response.parameters:
        if set(map(type, response.parameters.values())) != {str}:  # 1, 1.0 and True are one key of a cache
            return None
        parameters = tuple(response.parameters.items())
    described: list[Any] = []
    parts: list[Buffer] = [b""]
    for name, tensor in response.outputs.items():
        if formats.get(name, default) is not BINARY or type(tensor) is not np.ndarray or not tensor.nbytes:
            return None
        described += (name, tensor.dtype, tensor.shape)
        parts.append(tensor.tobytes() if tensor.nbytes < SMALL_BYTES else wire_view(tensor))
    if not described:
        return None
    try:
        if parameters:
            header = _header_with_parameters(response.model_name, response.model_version, parameters, *described)
        else:
            header = _binary_header(response.model_name, response.model_version, *described)
        header = b'{"id":' + orjson.dumps(response.id) + b"," + header if response.id else b"{" + header
    except TypeError:  # `encode` reports values that can not be sent
        return None
    parts[0] = header
    return new_reply((200, (BINARY_TYPE, (HEADER_LENGTH_NAME, b"%d" % len(header))), parts))


@lru_cache(maxsize=1024)
def _binary_header(model_name: str, model_version: str, *described: Any) -> bytes:
    """Return the JSON of a reply without its brace and its id. ``described`` are name, dtype and shape of each output,
    one after the other. Cached, because they repeat."""
    return _print_header({"model_name": model_name, "model_version": model_version}, described)


@lru_cache(maxsize=256)  # apart from the others: the parameters of a model may differ in every response
def _header_with_parameters(
    model_name: str, model_version: str, parameters: tuple[tuple[str, Any], ...], *described: Any
) -> bytes:
    """Return `_binary_header` with the parameters ``parameters``."""
    head = {"model_name": model_name, "model_version": model_version, "parameters": dict(parameters)}
    return _print_header(head, described)


def _print_header(head: dict[str, Any], described: Sequence[Any]) -> bytes:
    outputs = [
        {
            "name": name,
            "datatype": dtypes.BY_NUMPY[dtype].name,
            "shape": shape,
            "parameters": {"binary_data_size": prod(shape) * dtype.itemsize},
        }
        for name, dtype, shape in zip(described[::3], described[1::3], described[2::3], strict=True)
    ]
    return orjson.dumps({**head, "outputs": outputs})[1:]


def _unsendable(response: InferResponse, error: TypeError) -> HeadraceError:
    """Return why orjson can not print ``response``: a string that is not Unicode, or an integer beyond 64 bits."""
    for name, value in response.parameters.items():
        try:
            orjson.dumps({name: value})
        except TypeError as reason:
            return PluginError(f"response parameter {name!a} can not be sent: {reason}")
    return PluginError(f"the response of model '{response.model_name}' can not be sent: {error}")


def print_values(tensor: Tensor, loop_limit_bytes: int = UNBOUNDED) -> bytes:
    """Return the elements of ``tensor`` as a JSON array, flat and in row-major order, as `encode` prints them.

    Raises `InvalidArgument` for a data type without a JSON form, and `TooLargeForLoop` beyond ``loop_limit_bytes``.
    """
    printed: list[list[bytes]] = []
    data = _data(tensor, data_type(tensor).name, loop_limit_bytes, printed)
    return b"".join(printed[0]) if printed else orjson.dumps(data, option=_NUMPY)


def _length(header: bytes, printed: list[list[bytes]]) -> int:
    return len(header) + sum(sum(map(len, data)) - len(_MARK) for data in printed)


def _joined(header: bytes, printed: list[list[bytes]]) -> list[Buffer]:
    """Return ``header`` with each of ``printed`` in place of its mark, without copying large parts."""
    first, *rest = header.split(_MARK)
    parts: list[Buffer] = [first]
    for data, behind in zip(printed, rest, strict=True):
        parts += (*data, behind)
    return parts


def _data(tensor: Tensor, datatype: str, loop_limit_bytes: int, printed: list[list[bytes]]) -> Any:
    """Return the elements, flat and in row-major order, for orjson. Large data goes to ``printed``."""
    if isinstance(tensor, BytesTensor):
        if tensor.nbytes > loop_limit_bytes:
            raise TooLargeForLoop
        if tensor.nbytes <= LARGE_BYTES:
            return _strings(tensor.items())
        strings = tensor.reshape((len(tensor.offsets) - 1,))
        return _in_slices(strings.size, lambda begin, end: _strings(strings.rows(begin, end).items()), printed)
    kind = tensor.dtype.kind
    if datatype in ("FP16", "BF16"):
        raise InvalidArgument(
            f"sending {datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    if tensor.size < _MANY:
        values = tensor.ravel().tolist()
        if kind == "f" and not isfinite(sum(values)):
            return _floats(values)
        return values
    if tensor.nbytes > loop_limit_bytes:
        raise TooLargeForLoop
    flat = np.ascontiguousarray(tensor).reshape(-1)
    if tensor.nbytes <= LARGE_BYTES:
        return _numbers(flat)
    return _in_slices(len(flat), lambda begin, end: _numbers(flat[begin:end]), printed)


def _in_slices(count: int, slice_of: Callable[[int, int], Any], printed: list[list[bytes]]) -> orjson.Fragment:
    """Print ``count`` elements in slices, so that other threads can run. Return the placeholder."""
    parts = (slice_of(begin, end) for begin, end in slices(count, _ITEM_BYTES))
    data = [b",%s" % orjson.dumps(each, option=_NUMPY)[1:-1] for each in parts]
    data[0] = b"[%s" % data[0][1:]
    printed.append([*data, b"]"])
    return orjson.Fragment(_MARK)


def _numbers(flat: npt.NDArray[Any]) -> Any:
    if flat.dtype.kind != "f":
        return flat
    # Printed as doubles: 0.1 in FP32 is 0.10000000149011612 for a client of Triton.
    doubles: npt.NDArray[np.float64] = flat.astype(np.float64, copy=False)
    return doubles if np.isfinite(doubles).all() else _floats(doubles.tolist())


def _floats(values: list[float]) -> Any:
    """Return ``values`` with ``NaN`` and ``Infinity`` as Triton prints them, which orjson cannot."""
    return orjson.Fragment(json.dumps(values, separators=(",", ":")).encode())


def _strings(items: list[bytes]) -> Any:
    """Return JSON strings of the raw bytes. Invalid UTF-8 is sent unchanged, as by Triton."""
    try:
        return [item.decode() for item in items]
    except UnicodeDecodeError:
        texts = [item.decode(errors="surrogateescape") for item in items]
        return orjson.Fragment(json.dumps(texts, ensure_ascii=False).encode(errors="surrogateescape"))


def compressed(parts: Sequence[Buffer], encoding: bytes) -> bytes:
    """Return ``parts`` as one body, compressed by ``encoding``: ``gzip`` or ``deflate``."""
    deflater = zlib.compressobj(wbits=_WBITS[encoding])
    return b"".join([*[deflater.compress(part) for part in parts], deflater.flush()])


def _weight(text: bytes) -> float:
    if not text:
        return 1.0
    name, _, number = text.partition(b"=")
    try:
        return float(number) if name.strip() == b"q" else 0.0
    except ValueError:
        return 0.0
