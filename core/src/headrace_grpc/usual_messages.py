"""The usual messages, read without protobuf: a walk over their fields, most of which are looked up.

If a message differs from an earlier one only in its id and the bytes of its tensors, there is no walk either: all other
bytes are compared at once (`_Layout`).

Descriptions of inputs and outputs, and parameters, repeat between messages. Ids, strings and the bytes of tensors do
not, and need no parser. A message is unusual if a field is (listed contents, a region of shared memory, an unknown
type), or if fields contradict each other. `wire.unpack` and `decode` read these, and report errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from struct import Struct
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from google.protobuf.message import DecodeError

from headrace.errors import HeadraceError
from headrace.frontends.request_parameters import RequestParameters
from headrace.messages import dtypes
from headrace.messages.request import InferRequest, Parameter, Undecoded
from headrace.messages.tensor import BytesTensor, Tensor
from headrace.off_loop import LARGE_BYTES
from headrace_grpc import infer_parameters, wire
from headrace_grpc.decode import Decoded
from headrace_grpc.decode import decode as decode_unusual
from headrace_grpc.grpc_service_pb2 import ModelInferRequest
from headrace_grpc.wire import Buffer, RawRequest
from headrace_hosts.cleared_cache import ClearedCache

#: At most this many fields of a message are walked over, and bytes of one field looked up.
_MOST_FIELDS = 64
_MOST_BYTES = 512
#: More than any model has, and fewer than the maximum of NumPy.
_MOST_DIMS = 16
#: At most this many layouts are kept, of messages up to this size.
_MOST_LAYOUTS = 256
_MOST_LAYOUT_BYTES = 64 * 1024
_NAME, _VERSION, _ID, _PARAMETER, _INPUT, _OUTPUT, _RAW = (
    number << 3 | wire.LENGTH_DELIMITED for number in range(1, 8)
)


_NO_CLASSES: Mapping[str, int] = {}
_NO_PARAMETERS = RequestParameters()


class _Unusual(Exception):
    """protobuf, and the code that reports errors, must read this message."""


class _InputHead(NamedTuple):
    """An input without its bytes. ``numpy`` is None for strings, whose size varies."""

    name: str
    shape: tuple[int, ...]
    numpy: np.dtype[Any] | None
    size_bytes: int


class UsualMessage(NamedTuple):
    """The content of a ``ModelInferRequest``, and the places of its inputs' bytes in ``body``."""

    body: Buffer
    model_name: str
    model_version: str
    id: str
    inputs: Sequence[tuple[_InputHead, int, int]]
    outputs: Sequence[str]
    classes: Mapping[str, int]
    parameters: RequestParameters
    alike: object = None

    @property
    def message(self) -> UsualMessage:
        """The attributes of a `RawRequest`'s message: name and version of the model, and the id."""
        return self


#: The constructor would be a Python call.
_new_message = cast("Callable[[tuple[object, ...]], UsualMessage]", partial(tuple.__new__, UsualMessage))
#: A message that has been read, one way or the other.
ReadMessage: TypeAlias = RawRequest | UsualMessage


def unpack(body: Buffer) -> ReadMessage:
    """Return the content of ``body``; by `wire.unpack` if it is unusual."""
    return _read_alike(body) or _read(body) or wire.unpack(body)


def decode(message: ReadMessage, forwarded: Mapping[str, Parameter] | None = None) -> Decoded:
    """Return the request in ``message``, as `headrace_grpc.decode.decode` does. Raises as it does."""
    if not isinstance(message, UsualMessage):
        return decode_unusual(message, forwarded, LARGE_BYTES)
    body, name, version, request_id, heads, outputs, classes, read, alike = message
    inputs: dict[str, Tensor | Undecoded] = {}
    for head, begin, end in heads:
        if head.numpy is None:
            inputs[head.name] = BytesTensor(memoryview(body)[begin:end], head.shape)
        else:
            inputs[head.name] = np.ndarray(head.shape, head.numpy, body, begin)
    request = InferRequest(
        name,
        inputs,
        outputs,
        request_id,
        version,
        {**read.custom, **forwarded} if forwarded else {**read.custom},  # a copy, because a model may change it
        read.priority,
        read.timeout_us,
        read.sequence_id,
        read.sequence_start,
        read.sequence_end,
        (),
        None,
        False,
        alike,
    )
    return Decoded(request, classes, read.protocol_flag)


class _Layout(NamedTuple):
    """The layout of messages that differ only in their ids and the bytes of their tensors.

    ``unpack`` extracts from a message of the same size the bytes that must equal ``common``. The id is between
    ``id_begin`` and ``id_end``. The other fields are the same for all these messages.
    """

    unpack: Callable[[bytes], tuple[bytes, ...]]
    common: tuple[bytes, ...]
    id_begin: int
    id_end: int
    model_name: str
    model_version: str
    inputs: Sequence[tuple[_InputHead, int, int]]
    outputs: Sequence[str]
    classes: Mapping[str, int]
    parameters: RequestParameters
    alike: object


#: By the size of a message and its start, which is nearly always the model's name.
_layouts = ClearedCache[tuple[int, bytes], _Layout](_MOST_LAYOUTS)


def _read_alike(body: Buffer) -> UsualMessage | None:
    """Return the content of ``body`` if its layout is known; else None."""
    if type(body) is not bytes or len(body) < 2:
        return None
    layout = _layouts.get((len(body), body[: body[1] + 2]))
    if layout is None or layout.unpack(body) != layout.common:
        return None
    _, _, begin, end, name, version, inputs, outputs, classes, read, alike = layout
    try:
        return _new_message((body, name, version, body[begin:end].decode(), inputs, outputs, classes, read, alike))
    except UnicodeDecodeError:
        return None


def _keep_layout(message: UsualMessage, id_begin: int, id_end: int) -> None:
    """Keep the layout of ``message``, whose id is between ``id_begin`` and ``id_end``."""
    body, at, form = bytes(message.body), 0, ""
    for begin, end in sorted([(id_begin, id_end), *((begin, end) for _, begin, end in message.inputs)]):
        form += f"{begin - at}s{end - begin}x"
        at = end
    unpack = Struct(f"{form}{len(body) - at}s").unpack
    layout = _Layout(
        unpack,
        unpack(body),
        id_begin,
        id_end,
        message.model_name,
        message.model_version,
        message.inputs,
        message.outputs,
        message.classes,
        message.parameters,
        object(),
    )
    _layouts.keep((len(body), body[: body[1] + 2]), layout)


def _read(body: Buffer) -> UsualMessage | None:
    """Return the content of ``body``; None if it is unusual."""
    name = version = request_id = b""
    heads: list[_InputHead] = []
    places: list[tuple[int, int]] = []
    parameters: list[bytes] = []
    outputs, classes = list[str](), _NO_CLASSES
    at, end, fields, is_bytes = 0, len(body), 0, type(body) is bytes
    id_begin = id_end = 0
    try:
        while at < end:
            field, tag, size, begin = at, body[at], body[at + 1], at + 2
            if size > 0x7F:
                size, begin = wire.read_varint(body, at + 1)
            at = begin + size
            fields += 1
            if fields > _MOST_FIELDS:  # also for tensors: 60 MiB can be 30 million fields
                return None
            if tag == _RAW:
                places.append((begin, at))
                continue
            if size > _MOST_BYTES:
                return None
            content: Any = body[begin:at] if is_bytes else bytes(body[begin:at])
            if tag == _INPUT:
                heads.append(_input(content))
            elif tag == _NAME:
                name = _replaced(name, content)
            elif tag == _VERSION:
                version = _replaced(version, content)
            elif tag == _ID:
                request_id, id_begin, id_end = _replaced(request_id, content), begin, at
            elif tag == _OUTPUT:
                output, count = _output(content)
                outputs.append(output)
                if count:
                    classes = {**classes, output: count}
            elif tag == _PARAMETER:
                parameters.append(bytes(body[field:at]))
            else:
                return None
        if at != end or len(heads) != len(places):
            return None
        inputs = []
        for head, (begin, stop) in zip(heads, places, strict=True):
            size = stop - begin
            if size != head.size_bytes and (head.numpy is not None or size > LARGE_BYTES):
                return None
            inputs.append((head, begin, stop))
        if len(heads) > 1 and len({head.name for head in heads}) < len(heads):
            return None
        read, repeats = _read_parameters(b"".join(parameters)) if parameters else (_NO_PARAMETERS, True)
        message = UsualMessage(
            body, name.decode(), version.decode(), request_id.decode(), inputs, outputs, classes, read
        )
        if is_bytes and repeats and end <= _MOST_LAYOUT_BYTES and all(head.numpy is not None for head in heads):
            _keep_layout(message, id_begin, id_end)
        return message
    except (IndexError, UnicodeDecodeError, _Unusual):
        return None


def _replaced(before: bytes, content: bytes) -> bytes:
    """Return ``content``: of a repeated field, the last counts. Raises `UnicodeDecodeError` if ``before`` is no
    text."""
    before.decode()
    return content


@lru_cache(2048)
def _input(field: bytes) -> _InputHead:
    """Return the input that ``field`` describes. Raises `_Unusual`."""
    try:
        tensor = ModelInferRequest.InferInputTensor.FromString(field)
    except DecodeError:
        raise _Unusual from None
    found, shape = dtypes.BY_NAME.get(tensor.datatype), tuple(tensor.shape)
    if found is None or tensor.parameters or tensor.HasField("contents"):
        raise _Unusual
    if len(shape) > _MOST_DIMS or (shape and min(shape) < 0):
        raise _Unusual
    if found is dtypes.BYTES:
        return _InputHead(tensor.name, shape, None, -1)
    size_bytes = prod(shape) * found.itemsize
    if not size_bytes:
        raise _Unusual
    return _InputHead(tensor.name, shape, found.numpy, size_bytes)


@lru_cache(1024)
def _output(field: bytes) -> tuple[str, int]:
    """Return the output in ``field``, and its number of classes (0 for the tensor). Raises `_Unusual`."""
    try:
        output = ModelInferRequest.InferRequestedOutputTensor.FromString(field)
        if output.parameters.keys() - {"classification"}:
            raise _Unusual
        count = infer_parameters.classes(output.parameters)
    except (DecodeError, HeadraceError):
        raise _Unusual from None
    return output.name, count


def _read_parameters(fields: bytes) -> tuple[RequestParameters, bool]:
    """Return the parameters in ``fields``, and True if other requests are likely to have the same. Raises `_Unusual`.

    perf_analyzer and Triton's C++ client send the same parameters with each request. Parameters of a sequence change
    between requests, and others may: a layout is kept when they come the second time.
    """
    hits = _parameters.cache_info().hits
    read = _parameters(fields)
    return read, not read.is_in_sequence and _parameters.cache_info().hits > hits


@lru_cache(2048)
def _parameters(fields: bytes) -> RequestParameters:
    """Return the parameters in ``fields``; do not change them. Raises `_Unusual`."""
    try:
        return infer_parameters.read(ModelInferRequest.FromString(fields).parameters)
    except (DecodeError, HeadraceError):
        raise _Unusual from None
