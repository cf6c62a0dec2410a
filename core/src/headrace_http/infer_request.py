"""From the body of an infer request to an `InferRequest` (docs/spec/behaviours.md sections 1.3 and 1.5).

Binary tensors become views on the body and are never copied. Contradictions that only the model's signature can report
become `Undecoded`. JSON before binary tensors that was parsed before is not parsed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from struct import pack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from headrace.errors import InvalidArgument, Unsupported
from headrace.frontends.request_parameters import (
    BINARY_OUTPUTS,
    MAX_SEQUENCE_ID_BYTES,
    UINT64_MAX,
    ParameterReader,
)
from headrace.messages import dtypes
from headrace.messages.request import InferRequest, Parameter, Undecoded, log_id
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor, Tensor
from headrace.off_loop import LARGE_BYTES, UNBOUNDED, TooLargeForLoop
from headrace_hosts.cleared_cache import ClearedCache
from headrace_http.caller_limits import json_too_large, raw_too_large
from headrace_http.documents import (
    as_boolean,
    as_object,
    as_unicode,
    as_unsigned,
    check_depth,
    member,
    parse,
    wrong_type,
)
from headrace_http.inputs import read_inputs, view
from headrace_http.large_documents import read_document
from headrace_http.outputs import BINARY, JSON, OutputFormat, read_outputs
from headrace_http.request_layouts import FIXED_BYTES, LAYOUTS, RequestLayout

if TYPE_CHECKING:
    from headrace.engine import ModelView

#: The types of `headrace_http.inputs.read_inputs` and `headrace_http.outputs.read_outputs`.
ReadInputs: TypeAlias = Callable[[Any, str, str, memoryview, int, int, int], dict[str, "Tensor | Undecoded"]]
ReadOutputs: TypeAlias = Callable[[Any], tuple[Sequence[str], Mapping[str, OutputFormat]]]

_NO_FORMATS: Mapping[str, OutputFormat] = {}
#: The start of the JSON of clients that set a request id.
_ID_FIRST = b'{"id":"'
_LENGTH_NAME = "Inference-Header-Content-Length"
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class DecodedBody(NamedTuple):
    """A request, the format of each listed output, and the format of the others."""

    request: InferRequest
    formats: Mapping[str, OutputFormat]
    default: OutputFormat


def header_length(value: bytes, body_bytes: int) -> int:
    """Return the value of ``Inference-Header-Content-Length``: bytes of JSON before the tensors."""
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
    model: str,
    version: str,
    body: memoryview,
    json_bytes: int,
    max_bytes: int,
    loop_limit_bytes: int = UNBOUNDED,
    read_inputs: ReadInputs = read_inputs,
    read_outputs: ReadOutputs = read_outputs,
) -> DecodedBody:
    """Return the request to ``model`` in ``body``, whose first ``json_bytes`` are JSON.

    ``read_inputs`` and ``read_outputs`` read these members of the document. Raises `HeadraceError`, and
    `TooLargeForLoop` for JSON beyond ``loop_limit_bytes``.
    """
    if json_bytes > max_bytes:
        raise json_too_large(json_bytes, max_bytes)
    if json_bytes > loop_limit_bytes:
        raise TooLargeForLoop
    document = read_json(body if json_bytes == body.nbytes else body[:json_bytes])
    request_id = document.get("id", "")
    if type(request_id) is not str or not request_id.isascii():
        request_id = as_unicode(request_id, "id")
    read = None
    if "parameters" in document:
        read = PARAMETERS.read(as_object(document["parameters"], "parameters"))
    inputs = read_inputs(member(document, "inputs"), model, request_id, body, json_bytes, max_bytes, loop_limit_bytes)
    outputs, formats = read_outputs(document["outputs"]) if "outputs" in document else ((), _NO_FORMATS)
    if read is None:
        return DecodedBody(InferRequest(model, inputs, outputs, request_id, version), formats, JSON)
    request = read.request(model, inputs, outputs, request_id, version)
    return DecodedBody(request, formats, BINARY if read.protocol_flag else JSON)


def decode_raw(name: str, version: str, body: memoryview, model: ModelView, max_bytes: int) -> DecodedBody:
    """Return the request to ``model``, under ``name`` and ``version``, whose only input is the whole body."""
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


class BodyLayout(NamedTuple):
    """The layout of a body: the content of its JSON, and the ranges of its ``tensor_bytes`` after it."""

    tensor_bytes: int
    layout: RequestLayout
    formats: Mapping[str, OutputFormat]
    default: OutputFormat


class BodyLayoutCache:
    """Layouts by their JSON, without the id that it starts with."""

    def __init__(self) -> None:
        self._known = ClearedCache[bytes, BodyLayout](LAYOUTS)
        self._seen = ClearedCache[int, None](LAYOUTS)

    def find(self, body: memoryview, json_bytes: int) -> tuple[BodyLayout | None, str, bytes]:
        """Return the layout of ``body`` or None, its id, and its JSON without the id.

        The first ``json_bytes`` are JSON. The last value is empty if the layout will not be kept.
        """
        if json_bytes > FIXED_BYTES or json_bytes == body.nbytes:
            return None, "", b""
        request_id, rest = cut_id(body[:json_bytes].tobytes())
        layout = self._known.get(rest)
        if layout is not None and layout.tensor_bytes != body.nbytes - json_bytes:
            layout = None
        return layout, request_id, rest

    def keep(self, request_id: str, rest: bytes, decoded: DecodedBody, tensor_bytes: int) -> None:
        """Keep the layout of a body, from the second time on: most that come twice come again.

        ``request_id`` and ``rest`` are from `find`; ``tensor_bytes`` come after the JSON; ``decoded`` is the body,
        decoded.
        """
        digest = hash(rest)
        if digest not in self._seen:
            self._seen.keep(digest, None)
            return
        request, formats, default = decoded
        if request.id != request_id or (request_id and may_name_an_id(rest)):
            return
        layout = RequestLayout.of(request)
        # else some tensors were in the JSON
        if layout is not None and layout.ranges and layout.ranges[-1].end == tensor_bytes:
            self._known.keep(rest, BodyLayout(tensor_bytes, layout, formats, default))


def cut_id(front: bytes) -> tuple[str, bytes]:
    """Return the id at the start of ``front``, and the rest; no id and all of it if that needs a parser."""
    if not front.startswith(_ID_FIRST):
        return "", front
    end = front.find(b'"', len(_ID_FIRST))
    text = front[len(_ID_FIRST) : end]
    if not text.isascii() or b"\\" in text:
        return "", front
    request_id = text.decode()
    return (request_id, front[end:]) if request_id.isprintable() else ("", front)


def may_name_an_id(rest: bytes) -> bool:
    """True if there may be a second id, which would count."""
    return b'"id"' in rest or b"\\" in rest


def read_json(body: memoryview) -> dict[str, Any]:
    """Return the document in ``body``. Raises `InvalidArgument`."""
    document = parse(body) if body.nbytes <= LARGE_BYTES else read_document(body)
    if type(document) is dict:
        return document
    check_depth(document)
    return {}  # as Triton: it has no member


def _sequence_id(value: Any, name: str) -> int | str:
    if type(value) is int and 0 <= value <= UINT64_MAX:
        return value
    if type(value) is not str:
        raise wrong_type(name, "string", "string")
    if len(value.encode(errors="replace")) > MAX_SEQUENCE_ID_BYTES:
        raise Unsupported(f"string correlation ID cannot be longer than {MAX_SEQUENCE_ID_BYTES} characters")
    return value


def custom_parameter(value: Any, name: str) -> Parameter:
    """Return ``value`` as a parameter. Raises `InvalidArgument` if it is none."""
    if type(value) is int:
        # As Triton's parser, an integer outside int64 is a double.
        return value if _INT64_MIN <= value <= _INT64_MAX else float(value)
    if type(value) in (str, bool, float):
        return value  # type: ignore[no-any-return]
    raise InvalidArgument(f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'.")


#: Reads the parameters of a request in JSON.
PARAMETERS = ParameterReader[Any](BINARY_OUTPUTS, as_boolean, _sequence_id, as_unsigned, as_unsigned, custom_parameter)


def _raw_string(spec: Spec, body: memoryview, batch: tuple[int, ...]) -> BytesTensor:
    if prod(spec.dims) != 1:
        raise InvalidArgument(
            f"{log_id('')}For BYTE datatype raw input '{spec.name}', the model must have input shape [1]"
        )
    return BytesTensor(b"".join((pack("<I", body.nbytes), body)), batch + spec.dims)


def _deduce(spec: Spec, size_bytes: int, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims. The variable one, if any, follows from the size of the body."""
    variable = spec.dims.count(-1)
    if variable > 1:
        raise InvalidArgument(
            f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one "
            "variable-sized dimension"
        )
    fixed = prod([dim for dim in spec.dims if dim != -1]) * spec.datatype.itemsize
    return batch + tuple(size_bytes // fixed if dim == -1 else dim for dim in spec.dims)
