"""From a ``ModelInferRequest`` to an `InferRequest`, in Triton's order of checks.

The data of inputs, as bytes or as lists of numbers, becomes tensors. Source: docs/spec/behaviours.md section 2.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.errors import InvalidArgument
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.request import MAX_INPUTS, InferRequest, Parameter, Undecoded, log_id, too_many_inputs
from headrace.messages.tensor import BytesTensor, Tensor, wire_view
from headrace.off_loop import UNBOUNDED, TooLargeForLoop
from headrace_grpc import infer_parameters
from headrace_grpc.grpc_service_pb2 import InferTensorContents, ModelInferRequest
from headrace_grpc.large_requests import read_contents
from headrace_grpc.wire import Buffer, RawRequest, Span
from headrace_locations.tensor_locations import Target, no_region

#: The maximum of NumPy 2. Also, `prod` of millions of dims takes minutes.
_MAX_DIMS = 64


#: How many classes of an output are asked for, or where it is written.
Change: TypeAlias = "int | Target"


class Decoded(NamedTuple):
    """A request. ``classes`` maps outputs to the number of requested classes, or to where the output is written.

    If ``empty_final``, the end of a decoupled request is sent even without a response.
    """

    request: InferRequest
    classes: Mapping[str, Change]
    empty_final: bool = False


def decode(
    raw_request: RawRequest, forwarded: Mapping[str, Parameter] | None = None, loop_limit_bytes: int = UNBOUNDED
) -> Decoded:
    """Return the request in ``raw_request``. Its inputs are views on the received bytes.

    ``forwarded`` are parameters from metadata. Raises `InvalidArgument` with Triton's text, `NotFound` for a
    shared-memory region, and `TooLargeForLoop` for contents that are not parsed yet, and for strings of more than
    ``loop_limit_bytes``.
    """
    if raw_request.contents and loop_limit_bytes < UNBOUNDED:
        raise TooLargeForLoop
    message = raw_request.message
    read = infer_parameters.read(message.parameters)
    inputs = _inputs(message, raw_request, loop_limit_bytes)
    outputs = message.outputs
    request = InferRequest(
        message.model_name,
        inputs,
        [output.name for output in outputs],
        message.id,
        message.model_version,
        {**read.custom, **forwarded} if forwarded else read.custom,
        read.priority,
        read.timeout_us,
        read.sequence_id,
        read.sequence_start,
        read.sequence_end,
    )
    return Decoded(request, _classes(outputs), read.protocol_flag)


def _inputs(
    message: ModelInferRequest, raw_request: RawRequest, loop_limit_bytes: int
) -> dict[str, Tensor | Undecoded]:
    raw = raw_request.raw
    inputs: dict[str, Tensor | Undecoded] = {}
    position = 0
    if len(message.inputs) > MAX_INPUTS:
        raise too_many_inputs(len(message.inputs))
    for tensor in message.inputs:
        name = tensor.name
        if name in inputs:
            raise InvalidArgument(f"{log_id(message.id)}input '{name}' already exists in request")
        if tensor.parameters:
            _refuse_shared_memory(message.model_name, tensor)
        if tensor.HasField("contents"):
            inputs[name] = _typed(message.model_name, tensor, raw_request, len(inputs))
        elif position < len(raw):
            inputs[name] = _from_bytes(tensor.datatype, tuple(tensor.shape), raw[position], loop_limit_bytes)
            position += 1
        else:
            raise InvalidArgument(
                f"unable to find data for input tensor '{name}' for model '{message.model_name}' in request."
            )
    return inputs


def _typed(
    model: str, tensor: ModelInferRequest.InferInputTensor, raw_request: RawRequest, number: int
) -> Tensor | Undecoded:
    if len(raw_request.raw):
        raise InvalidArgument(
            f"contents field must not be specified when using raw_input_contents for '{tensor.name}' for model "
            f"'{model}'"
        )
    spans = raw_request.contents.get(number)
    if spans is not None:
        return _from_spans(tensor.name, model, tensor.datatype, tuple(tensor.shape), raw_request.body, spans)
    return _from_contents(tensor.name, model, tensor.datatype, tuple(tensor.shape), tensor.contents)


def _refuse_shared_memory(model: str, tensor: ModelInferRequest.InferInputTensor) -> None:
    region = infer_parameters.shared_memory_region(tensor.name, tensor.parameters)
    if region is None:
        return
    if tensor.HasField("contents"):
        raise InvalidArgument(
            f"unexpected 'content' provided when using shared memory for input tensor '{tensor.name}' for model "
            f"'{model}'"
        )
    raise no_region(region)


def _classes(outputs: Sequence[ModelInferRequest.InferRequestedOutputTensor]) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for output in outputs:
        given = output.parameters
        if not given:
            continue
        region = infer_parameters.shared_memory_region(output.name, given)
        count = infer_parameters.classes(given)
        if region is not None and count:
            raise InvalidArgument("output can't set both 'shared_memory_region' and 'classification'")
        if region is not None:
            raise no_region(region)
        if count:
            wanted[output.name] = count
    return wanted


# ---------------------------------------------------------------------- the data of an input


@dataclass(frozen=True, slots=True)
class _Field:
    """A field of ``InferTensorContents``, its type in error texts, and the types that it accepts."""

    name: str
    named: DataType
    takes: tuple[DataType, ...]
    numpy: npt.DTypeLike


_FIELDS = (
    _Field("bool_contents", dtypes.BOOL, (dtypes.BOOL,), np.bool_),
    _Field("int_contents", dtypes.INT32, (dtypes.INT8, dtypes.INT16, dtypes.INT32), np.int32),
    _Field("int64_contents", dtypes.INT64, (dtypes.INT64,), np.int64),
    _Field("uint_contents", dtypes.UINT32, (dtypes.UINT8, dtypes.UINT16, dtypes.UINT32), np.uint32),
    _Field("uint64_contents", dtypes.UINT64, (dtypes.UINT64,), np.uint64),
    _Field("fp32_contents", dtypes.FP32, (dtypes.FP32,), np.float32),
    _Field("fp64_contents", dtypes.FP64, (dtypes.FP64,), np.float64),
    _Field("bytes_contents", dtypes.BYTES, (dtypes.BYTES,), np.object_),
)


def _from_bytes(
    datatype: str, shape: tuple[int, ...], buffer: bytes | memoryview, loop_limit_bytes: int = UNBOUNDED
) -> Tensor | Undecoded:
    """Return the tensor of the wire bytes ``buffer``, as a view.

    Return `Undecoded` if the type is unknown, or if the size contradicts the shape. Raises `TooLargeForLoop` for
    strings of more than ``loop_limit_bytes``.
    """
    found = dtypes.BY_NAME.get(datatype)
    if found is None or len(shape) > _MAX_DIMS or (shape and min(shape) < 0):
        return Undecoded(datatype, shape, memoryview(buffer))
    if not found.itemsize:
        if len(buffer) > loop_limit_bytes:
            raise TooLargeForLoop
        return BytesTensor(buffer, shape)
    if len(buffer) == prod(shape) * found.itemsize:
        try:
            return np.frombuffer(buffer, found.numpy).reshape(shape)
        except ValueError:  # more dims than this NumPy has, or zero elements in an impossible shape
            pass
    return Undecoded(datatype, shape, memoryview(buffer))


def _from_contents(
    name: str, model: str, datatype: str, shape: tuple[int, ...], contents: InferTensorContents
) -> Tensor | Undecoded:
    """Return the tensor of the elements that ``contents`` lists. Copies every element.

    Integers are truncated to their width. Raises `InvalidArgument` if more than one field is given, or one that does
    not belong to ``datatype``.
    """
    given = [field for field in _FIELDS if getattr(contents, field.name)]
    _check(given, name, model, datatype)
    return _from_bytes(datatype, shape, _wire(given[0], datatype, contents) if given else b"")


def _from_spans(
    name: str, model: str, datatype: str, shape: tuple[int, ...], body: Buffer, spans: Sequence[Span]
) -> Tensor | Undecoded:
    """`_from_contents` for contents that are still in ``spans`` of ``body``. Also raises `DecodeError`."""
    found = read_contents(body, spans)
    given = [field for field in _FIELDS if field.name in found]
    _check(given, name, model, datatype)
    if not given:
        return _from_bytes(datatype, shape, b"")
    values = found[given[0].name]
    if isinstance(values, memoryview):
        return _from_bytes(datatype, shape, values)
    return _from_bytes(datatype, shape, wire_view(values.astype(dtypes.BY_NAME[datatype].numpy, copy=False)))


def _check(given: Sequence[_Field], name: str, model: str, datatype: str) -> None:
    """Raise `InvalidArgument` unless only the field for ``datatype`` is given."""
    for number, field in enumerate(given):
        if number:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}', binary data was "
                "already supplied."
            )
        if datatype not in [taken.name for taken in field.takes]:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type "
                f"'{field.named}', expected datatype '{datatype}'"
            )


def _wire(field: _Field, datatype: str, contents: InferTensorContents) -> memoryview:
    values = getattr(contents, field.name)
    if field.named is dtypes.BYTES:
        return BytesTensor.from_items(values, (len(values),)).buffer
    array = np.fromiter(values, field.numpy, len(values))
    return wire_view(array.astype(dtypes.BY_NAME[datatype].numpy, copy=False))
