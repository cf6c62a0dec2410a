"""An `InferResponse`, to the body of a reply (behaviours.md section 1.3, response)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from penstock.errors import InvalidArgument
from penstock.frontends.classification import classify
from penstock.frontends.http.compression import compress
from penstock.frontends.http.forms import Form
from penstock.frontends.http.message import Buffer, HttpReply
from penstock.messages.response import InferResponse
from penstock.messages.tensor import BytesTensor, Tensor, data_type, wire_bytes

_NUMPY = orjson.OPT_SERIALIZE_NUMPY
#: From here on an array is printed by orjson itself; below, a list is cheaper (measured).
_MANY = 128
_TYPE, _LENGTH, _ENCODING = b"Content-Type", b"Inference-Header-Content-Length", b"Content-Encoding"
_JSON_TYPE = (_TYPE, b"application/json")
_BINARY_TYPE = (_TYPE, b"application/octet-stream")


def encode(
    response: InferResponse,
    forms: Mapping[str, Form],
    default: Form,
    labels: Mapping[str, Sequence[str]],
    is_batched: bool,
    encoding: bytes = b"identity",
) -> HttpReply:
    """The reply to an infer request; binary tensors are views, not copies, unless compressed.

    ``forms`` and ``default`` say how to send each output, ``labels`` name the classes of an
    output. Raises `InvalidArgument` for what has no JSON form or no classes.
    """
    document: dict[str, Any] = {"id": response.id} if response.id else {}
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = dict(response.parameters)
    outputs: list[dict[str, Any]] = []
    document["outputs"] = outputs
    parts: list[Buffer] = [b""]
    for name, tensor in response.outputs.items():
        form = forms.get(name, default)
        if form.classes:
            tensor = classify(tensor, form.classes, labels.get(name, ()), is_batched)
        datatype = data_type(tensor).name
        if form.is_binary:
            size = tensor.nbytes
            outputs.append(
                {"name": name, "datatype": datatype, "shape": tensor.shape, "parameters": {"binary_data_size": size}}
            )
            if size:
                parts.append(wire_bytes(tensor))
        else:
            outputs.append({"name": name, "datatype": datatype, "shape": tensor.shape, "data": _data(tensor, datatype)})
    parts[0] = header = orjson.dumps(document, option=_NUMPY)
    headers = [_JSON_TYPE] if len(parts) == 1 else [_BINARY_TYPE, (_LENGTH, b"%d" % len(header))]
    if encoding == b"identity":
        return HttpReply(200, headers, parts)
    headers.append((_ENCODING, encoding))
    return HttpReply(200, headers, (compress(parts, encoding),))


def _data(tensor: Tensor, datatype: str) -> Any:
    """The elements, flat and in row-major order, as something orjson prints."""
    if isinstance(tensor, BytesTensor):
        return _strings(tensor)
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
    flat = np.ascontiguousarray(tensor).reshape(-1)
    if kind != "f":
        return flat
    # Printed as doubles: 0.1 in FP32 is 0.10000000149011612 to a client of Triton.
    doubles: npt.NDArray[np.float64] = flat.astype(np.float64, copy=False)
    return doubles if np.isfinite(doubles).all() else _floats(doubles.tolist())


def _floats(values: list[float]) -> Any:
    """``values`` with ``NaN`` and ``Infinity`` as Triton prints them, which orjson cannot."""
    return orjson.Fragment(json.dumps(values, separators=(",", ":")).encode())


def _strings(tensor: BytesTensor) -> Any:
    """JSON strings of the raw bytes. Those that are not UTF-8 go out as they are, as Triton's do."""
    items = tensor.items()
    try:
        return [item.decode() for item in items]
    except UnicodeDecodeError:
        texts = [item.decode(errors="surrogateescape") for item in items]
        return orjson.Fragment(json.dumps(texts, ensure_ascii=False).encode(errors="surrogateescape"))
