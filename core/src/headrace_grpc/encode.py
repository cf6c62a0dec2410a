"""From an `InferResponse` to a serialized ``ModelInferResponse`` (docs/spec/behaviours.md section 2.4).

The bytes of its tensors are copied once; protobuf would copy them twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from headrace.engine import ModelView
from headrace.errors import InvalidArgument
from headrace.messages.request import Parameter
from headrace.messages.response import InferResponse
from headrace.messages.tensor import data_type, wire_bytes
from headrace.off_loop import UNBOUNDED, TooLargeForLoop
from headrace_grpc import infer_parameters
from headrace_grpc.decode import Change
from headrace_grpc.grpc_service_pb2 import ModelInferResponse
from headrace_grpc.wire import LENGTH_DELIMITED, MESSAGE_BYTES, Buffer, varint
from headrace_hosts import classification
from headrace_locations.tensor_locations import Target

_ID_TAG = bytes([3 << 3 | LENGTH_DELIMITED])
_RAW_OUTPUT_TAG = bytes([6 << 3 | LENGTH_DELIMITED])
_ERROR_MESSAGE_TAG = bytes([1 << 3 | LENGTH_DELIMITED])
_INFER_RESPONSE_TAG = bytes([2 << 3 | LENGTH_DELIMITED])
_FINAL = "triton_final_response"
_NO_CHANGES: Mapping[str, Change] = {}


def encode(
    response: InferResponse,
    model: ModelView,
    classes: Mapping[str, Change] = _NO_CHANGES,
    final: bool | None = None,
    loop_limit_bytes: int = UNBOUNDED,
) -> bytes:
    """Return ``response`` serialized. Tensor bytes are copied once, into the result.

    ``classes`` maps outputs to the number of classes to send instead of the tensor, or to where it is written.
    ``final`` marks the responses of streams. Raises `InvalidArgument` for an output that cannot be classified and for a
    response too large for gRPC, `PluginError` for a parameter that cannot be sent, and `TooLargeForLoop` if more than
    ``loop_limit_bytes`` must be ranked or written.
    """
    if classes:
        return _encode_changed(response, model, classes, final, loop_limit_bytes)
    outputs = response.outputs
    described = tuple([(name, data_type(tensor).name, tensor.shape) for name, tensor in outputs.items()])
    # Concatenated serialized messages are one message with the fields of all.
    header = _names(response.model_name, response.model_version)
    if response.id or response.parameters or final is not None:
        header += _rare(response, final)
    return pack(header + _described(described), [wire_bytes(tensor) for tensor in outputs.values()])


def _encode_changed(
    response: InferResponse, model: ModelView, changes: Mapping[str, Change], final: bool | None, loop_limit_bytes: int
) -> bytes:
    """Do as `encode`, if classes are sent instead of some outputs, or some are written elsewhere."""
    described: list[tuple[str, str, tuple[int, ...]]] = []
    raw: list[Buffer] = []
    for name, output in response.outputs.items():
        change, tensor = changes.get(name, 0), output
        if isinstance(change, Target):
            change.write(name, output, loop_limit_bytes)
            raw.append(b"")
        else:
            if change and output.nbytes > loop_limit_bytes:
                raise TooLargeForLoop
            if change:
                labels = model.labels.get(name, ())
                tensor = classification.classify(output, change, labels, model.max_batch_size > 0)
            raw.append(wire_bytes(tensor))
        described.append((name, data_type(tensor).name, tensor.shape))
    header = _names(response.model_name, response.model_version)
    if response.id or response.parameters or final is not None:
        header += _rare(response, final)
    return pack(header + _described(tuple(described)), raw)


@lru_cache(256)
def _names(model_name: str, model_version: str) -> bytes:
    return ModelInferResponse(model_name=model_name, model_version=model_version).SerializeToString()


def _rare(response: InferResponse, final: bool | None) -> bytes:
    """Return the fields that not all responses have."""
    header = b""
    if response.id:
        text = response.id.encode()
        header = _ID_TAG + varint(len(text)) + text
    if parameters := response.parameters:
        is_text = set(map(type, parameters.values())) == {str}  # 1, 1.0 and True are one key of a cache
        header += (_texts if is_text else _texts.__wrapped__)(tuple(parameters.items()))
    return header if final is None else header + _final(final)


@lru_cache(2)
def _final(is_final: bool) -> bytes:
    header = ModelInferResponse()
    header.parameters[_FINAL].bool_param = is_final
    return header.SerializeToString()


@lru_cache(256)
def _texts(parameters: tuple[tuple[str, Parameter], ...]) -> bytes:
    """Return ``parameters``. Cached if all are strings, because those of a scheduler repeat."""
    header = ModelInferResponse()
    infer_parameters.write(dict(parameters), header.parameters)
    return header.SerializeToString()


@lru_cache(1024)
def _described(outputs: tuple[tuple[str, str, tuple[int, ...]], ...]) -> bytes:
    """Return the name, data type and shape of each of ``outputs``. Cached, because they repeat."""
    header = ModelInferResponse()
    for name, datatype, shape in outputs:
        header.outputs.add(name=name, datatype=datatype, shape=shape)
    return header.SerializeToString()


def encode_empty(id: str, model_name: str = "", model_version: str = "", final: bool | None = None) -> bytes:
    """Return a response without outputs: the end of a decoupled request, or the body of an error."""
    names = _names.__wrapped__(model_name, model_version)  # not kept: of an error, they may be any
    return names + _rare(InferResponse({}, id=id), final)


# ---------------------------------------------------------------------- on the wire


def pack(header: bytes, raw: Sequence[Buffer]) -> bytes:
    """Return a serialized ``ModelInferResponse`` with ``raw`` as its ``raw_output_contents``. Copies each byte once.

    Raises `InvalidArgument` if it is too large for a gRPC message.
    """
    parts: list[Buffer] = [header]
    for data in raw:
        parts += (_raw_head(len(data)), data)
    size = sum(map(len, parts))
    if size > MESSAGE_BYTES:
        raise InvalidArgument(f"Response has byte size {size} which exceeds gRPC's byte size limit {MESSAGE_BYTES}.")
    return b"".join(parts)


@lru_cache(1024)
def _raw_head(size_bytes: int) -> bytes:
    """Return the bytes before raw contents of that size."""
    return _RAW_OUTPUT_TAG + varint(size_bytes)


def pack_stream(response: bytes, error: str = "") -> bytes:
    """Return a serialized ``ModelStreamInferResponse`` around a serialized ``ModelInferResponse``."""
    text = error.encode("utf-8", "replace")
    start = _ERROR_MESSAGE_TAG + varint(len(text)) + text if text else b""
    return b"".join((start, _INFER_RESPONSE_TAG, varint(len(response)), response))
