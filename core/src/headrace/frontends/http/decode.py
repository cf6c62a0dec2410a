"""The body of an infer request, to an `InferRequest` (docs/spec/behaviours.md sections 1.3 and 1.5).

Binary tensors become views on the body and are never copied. What contradicts itself in a way
that only the model's signature can word becomes `Undecoded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from struct import pack
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import InvalidArgument
from headrace.frontends.http.documents import as_string, check_depth, malformed, member, parse
from headrace.frontends.http.inputs import read_inputs, view
from headrace.frontends.http.outline import read_document
from headrace.frontends.http.output_format import BINARY, OutputFormat, read_outputs
from headrace.frontends.http.parameters import DocumentParameters, read_parameters
from headrace.large import LARGE_BYTES, UNBOUNDED, Large
from headrace.messages import dtypes
from headrace.messages.request import InferRequest, Undecoded, log_id
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor, Tensor

if TYPE_CHECKING:
    from headrace.engine import ModelView

_NO_FORMATS: Mapping[str, OutputFormat] = {}
_NO_PARAMETERS = DocumentParameters()
_LENGTH_NAME = "Inference-Header-Content-Length"


class DecodedBody(NamedTuple):
    """A request, the format of each output that is listed, and that of the others."""

    request: InferRequest
    formats: Mapping[str, OutputFormat]
    default: OutputFormat


def header_length(value: bytes, body_bytes: int) -> int:
    """The value of ``Inference-Header-Content-Length``: bytes of JSON in front of the tensors."""
    if value.isdigit() and len(value) < 10 and int(value) <= body_bytes:
        return int(value)
    text = value.decode("latin-1")
    digits = value[1:] if value[:1] == b"-" else value
    if not digits.isdigit():
        raise InvalidArgument(f"Unable to parse {_LENGTH_NAME}, got: {text}")
    length = int(value) if len(digits) < 12 else 2**31
    if not -(2**31) <= length < 2**31:
        raise InvalidArgument(
            f"Unable to parse {_LENGTH_NAME}, value is out of range [ -2147483648, 2147483647 ], got: {text}"
        )
    if not 0 <= length <= body_bytes:
        raise InvalidArgument(f"inference header size should be in range (0, {body_bytes}), got: {text}")
    return length


def decode(
    model: str, version: str, body: memoryview, json_bytes: int, max_bytes: int, patience: int = UNBOUNDED
) -> DecodedBody:
    """The request to ``model`` in ``body``, whose first ``json_bytes`` are JSON.

    Raises `HeadraceError`, and `Large` for JSON beyond ``patience`` bytes.
    """
    if json_bytes > max_bytes:
        raise json_too_large(json_bytes, max_bytes)
    if json_bytes > patience:
        raise Large
    document = _document(body[:json_bytes])
    request_id = _id(document["id"]) if "id" in document else ""
    read = read_parameters(document["parameters"]) if "parameters" in document else _NO_PARAMETERS
    inputs = read_inputs(member(document, "inputs"), model, request_id, body, json_bytes, max_bytes, patience)
    outputs, formats = read_outputs(document["outputs"]) if "outputs" in document else ((), _NO_FORMATS)
    request = InferRequest(
        model,
        inputs,
        outputs,
        request_id,
        version,
        read.custom or {},
        read.priority,
        read.timeout_us,
        read.sequence_id,
        read.sequence_start,
        read.sequence_end,
    )
    return DecodedBody(request, formats, read.default)


def decode_raw(name: str, version: str, body: memoryview, model: ModelView, max_bytes: int) -> DecodedBody:
    """The request to ``model``, under ``name`` and ``version``, with the one input that it has: the whole body."""
    if body.nbytes > max_bytes:
        raise raw_too_large(body.nbytes, max_bytes)
    if len(model.inputs) != 1:
        raise InvalidArgument(
            f"{log_id('')}Raw request must only have 1 input (found 1) to be deduced but got {len(model.inputs)} "
            f"inputs in '{model.name}' model configuration"
        )
    (spec,) = model.inputs.values()
    batch = (1,) if model.max_batch_size > 0 else ()
    tensor: Tensor | Undecoded
    if spec.datatype is dtypes.BYTES:
        tensor = _raw_string(spec, body, batch)
    else:
        shape = _deduce(spec, body.nbytes, batch)
        tensor = view(body, 0, body.nbytes, spec.datatype.name, shape, prod(shape))
    return DecodedBody(InferRequest(name, {spec.name: tensor}, model_version=version), _NO_FORMATS, BINARY)


def json_too_large(size_bytes: int, max_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"request JSON size of {size_bytes} bytes exceeds the maximum allowed input size of {max_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def raw_too_large(size_bytes: int, max_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"Raw input has a byte_size ({size_bytes} bytes) that exceeds the maximum allowed value of {max_bytes} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def _document(body: memoryview) -> dict[str, Any]:
    document = parse(body) if body.nbytes <= LARGE_BYTES else read_document(body)
    if type(document) is dict:
        return document
    check_depth(document)
    return {}  # has no member, as Triton sees it


def _id(value: Any) -> str:
    """The request id, which goes back to the caller and so must be Unicode."""
    text = as_string(value, "id")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise malformed("Unable to parse 'id': half of a surrogate pair") from None
    return text


def _raw_string(spec: Spec, body: memoryview, batch: tuple[int, ...]) -> BytesTensor:
    if prod(spec.dims) != 1:
        raise InvalidArgument(
            f"{log_id('')}For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
        )
    return BytesTensor(b"".join((pack("<I", body.nbytes), body)), batch + spec.dims)


def _deduce(spec: Spec, size_bytes: int, batch: tuple[int, ...]) -> tuple[int, ...]:
    """The dims, with the variable one, if any, found from the size of the body."""
    variable = spec.dims.count(-1)
    if variable > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    fixed = prod([dim for dim in spec.dims if dim != -1]) * spec.datatype.itemsize
    return batch + tuple(size_bytes // fixed if dim == -1 else dim for dim in spec.dims)
