"""Requests to send: recorded ones from a file, or generated from a model's metadata."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from headrace import one_line, open_regular
from headrace_compare.named_tensors import BINARY_ONLY, BadTensor, NamedTensor, content_of
from headrace_compare.request_headers import checked_headers

#: The longest line of a file of requests, and the largest JSON of perf_analyzer.
_MAX_BYTES = 256 << 20
#: The size of a variable dimension is drawn from 1 to this.
_LARGEST_DIMENSION = 8


class BadRequests(Exception):
    """A file of requests that cannot be read; the message has its name and line."""


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    """An inference request: ``body`` is the JSON object of the v2 protocol, ``place`` its source."""

    place: str
    model: str
    body: Mapping[str, Any]
    version: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def inputs(self) -> list[NamedTensor]:
        """Return the input tensors. Raises `BadTensor`."""
        return [NamedTensor.from_json(each) for each in self.body["inputs"]]


def read_requests(path: Path, model: str) -> Iterator[ComparedRequest]:
    """Yield the requests of the file ``path``: JSON lines, or perf_analyzer's JSON, which names no model.

    Raises `BadRequests`.
    """
    try:
        with open_regular(path) as file:
            head = file.read(4096).lstrip()
            file.seek(0)
            if _is_whole_document(head):
                yield from _read_perf_analyzer(file.read(_MAX_BYTES + 1), path, model)
                return
            for number in range(1, 1 << 62):
                line = file.readline(_MAX_BYTES + 1)
                if not line:
                    return
                if len(line) > _MAX_BYTES:
                    raise BadRequests(f"{path}:{number}: more than {_MAX_BYTES >> 20} MiB")
                if line.strip():
                    yield _of_line(_parse(line, f"{path}:{number}"), f"{path}:{number}", model)
    except OSError as error:
        raise BadRequests(f"{path}: {error.strerror or error}") from error


def _is_whole_document(head: bytes) -> bool:
    """True for a file that begins as perf_analyzer's does: ``{`` and ``"data"``, which no recorded request has."""
    return head.startswith(b"{") and head[1:].lstrip().startswith(b'"data"')


def _parse(text: bytes, place: str) -> Any:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequests(f"{place}: no JSON: {one_line(str(error))}") from error
    if not isinstance(document, dict):
        raise BadRequests(f"{place}: expected a JSON object")
    return document


def _of_line(document: Mapping[str, Any], place: str, model: str) -> ComparedRequest:
    """Return the request of a line: an object of the protocol with ``model``, or ``path`` and ``body`` of HTTP."""
    body, version, headers = document.get("body", document), document.get("version", ""), document.get("headers", {})
    named = document.get("model", document.get("model_name", model))
    if "path" in document:
        parts = str(document["path"]).strip("/").split("/")
        if parts[:2] != ["v2", "models"] or parts[-1] != "infer" or len(parts) not in (4, 6):
            raise BadRequests(f"{place}: 'path' is '{one_line(str(document['path']))}', expected /v2/models/NAME/infer")
        named, version = unquote(parts[2]), parts[4] if len(parts) == 6 else ""
    if not (isinstance(named, str) and named):
        raise BadRequests(f"{place}: it names no model: give 'model' or 'path', or --model")
    if not (isinstance(body, dict) and isinstance(body.get("inputs"), list)):
        raise BadRequests(f"{place}: expected an object with a list 'inputs'")
    try:
        sent = checked_headers(headers)
    except ValueError as error:
        raise BadRequests(f"{place}: {one_line(str(error))}") from error
    known = {key: value for key, value in body.items() if key in ("id", "inputs", "outputs", "parameters")}
    return _checked(ComparedRequest(place, named, known, str(version), sent))


def _checked(request: ComparedRequest) -> ComparedRequest:
    """Return ``request``. Raises `BadRequests` for what is none of the protocol."""
    outputs = request.body.get("outputs", [])
    if not (isinstance(outputs, list) and all(isinstance(each, dict) and "name" in each for each in outputs)):
        raise BadRequests(f"{request.place}: 'outputs' is no list of objects with a 'name'")
    for each in (request.body, *request.body["inputs"], *outputs):
        if isinstance(each, Mapping) and not isinstance(each.get("parameters", {}), dict):
            raise BadRequests(f"{request.place}: 'parameters' is no object")
    try:
        _ = request.inputs
    except BadTensor as error:
        raise BadRequests(f"{request.place}: 'inputs' has {error}") from error
    return request


def _read_perf_analyzer(text: bytes, path: Path, model: str) -> Iterator[ComparedRequest]:
    if len(text) > _MAX_BYTES:
        raise BadRequests(f"{path}: more than {_MAX_BYTES >> 20} MiB")
    document = _parse(text, str(path))
    if not model:
        raise BadRequests(f"{path}: perf_analyzer's file names no model: give --model")
    data = document["data"]
    if not isinstance(data, list):
        raise BadRequests(f"{path}: 'data' is no list")
    steps = [step for each in data for step in (each if isinstance(each, list) else [each])]
    for number, step in enumerate(steps, 1):
        place = f"{path}: step {number}"
        if not isinstance(step, dict):
            raise BadRequests(f"{place}: expected an object of inputs")
        yield ComparedRequest(place, model, {"perf_analyzer": step})


def completed(request: ComparedRequest, metadata: Mapping[str, Any], config: Mapping[str, Any]) -> ComparedRequest:
    """Return ``request`` with the datatypes and shapes of ``metadata``, which perf_analyzer's file leaves out.

    Raises `BadRequests`.
    """
    step = request.body.get("perf_analyzer")
    if step is None:
        return request
    has_rows, inputs = int(config.get("max_batch_size", 0)) > 0, list[Any]()
    for tensor in metadata.get("inputs", ()):
        if tensor["name"] not in step:
            continue
        value = step[tensor["name"]]
        try:
            content = content_of(value)
        except ValueError as error:
            raise BadRequests(f"{request.place}: '{tensor['name']}' has no base64: {error}") from error
        shape = value.get("shape") if isinstance(value, dict) else None
        shape = shape or [int(each) for each in tensor["shape"]][int(has_rows) :]
        if isinstance(content, bytes):
            content = NamedTensor.from_bytes(tensor["name"], tensor["datatype"], shape, content).values.tolist()
        if any(int(each) < 0 for each in shape):
            shape = [len(content)]
        shape = [1, *shape] if has_rows else list(shape)
        inputs.append({"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape, "data": content})
    return _checked(ComparedRequest(request.place, request.model, {"inputs": inputs}))


def made_requests(
    model: str, metadata: Mapping[str, Any], config: Mapping[str, Any], count: int, seed: int
) -> Iterator[ComparedRequest]:
    """Yield ``count`` requests with random inputs of the datatypes and shapes in ``metadata``.

    The same ``seed`` gives the same requests. A variable dimension is 1 to 8, and equal in all inputs that have it at
    the same position.
    """
    random = np.random.default_rng([seed, *model.encode()])
    most_rows = min(int(config.get("max_batch_size", 0)), _LARGEST_DIMENSION)
    for number in range(1, count + 1):
        drawn, rows = dict[int, int](), int(random.integers(1, most_rows + 1)) if most_rows else 0
        inputs = []
        for tensor in metadata.get("inputs", ()):
            shape = [int(each) for each in tensor["shape"]]
            for at, size in enumerate(shape):
                if at == 0 and rows:
                    shape[0] = rows
                elif size < 0:
                    shape[at] = drawn.setdefault(at, int(random.integers(1, _LARGEST_DIMENSION + 1)))
            data = _drawn(random, str(tensor["datatype"]), int(np.prod(shape)))
            inputs.append({"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape, "data": data})
        yield ComparedRequest(f"request {number} of seed {seed}", model, {"id": str(number), "inputs": inputs})


def _drawn(random: np.random.Generator, datatype: str, size: int) -> list[Any]:
    if datatype == "BYTES":
        return [f"word{each}" for each in random.integers(0, 1000, size)]
    if datatype == "BOOL":
        return [bool(each) for each in random.integers(0, 2, size)]
    if datatype in (*BINARY_ONLY, "FP32", "FP64"):
        return [float(each) for each in random.normal(size=size).astype(np.float16)]
    return [int(each) for each in random.integers(0, 100, size)]
