"""An inference request for any model: one element along each variable dimension, all values zero.

Source of the form: docs/spec/behaviours.md section 1.3.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from headrace import ModelView, Unsupported

#: An example with more elements is a separate document.
INLINE = 64
#: The maximum elements of an example. It is written on a thread, and sent as a whole.
MAX_ELEMENTS = 1 << 22
#: Data types that JSON has no numbers for.
_BINARY_ONLY = ("FP16", "BF16")
_ZEROS = {"BOOL": "false", "BYTES": '"text"', "FP32": "0.0", "FP64": "0.0"}


def why_no_example(model: ModelView) -> str:
    """Return the reason why no JSON request fits ``model``; empty if one does."""
    if model.decoupled:
        return "it gives any number of responses, so that `infer` over HTTP refuses it: use gRPC or a stream"
    for name, datatype, shape in _required_inputs(model):
        if datatype in _BINARY_ONLY:
            return f"input '{name}' is {datatype}, which JSON can not express: send it as binary data"
        if prod(shape) > MAX_ELEMENTS:
            return f"input '{name}' has {prod(shape)} elements"
    return ""


def elements(model: ModelView) -> int:
    """Return the number of elements of all inputs of the example."""
    return sum(prod(shape) for _, _, shape in _required_inputs(model))


def example(model: ModelView) -> dict[str, Any]:
    """Return a small example as the value of a JSON document. Only for at most `INLINE` elements."""
    document: dict[str, Any] = json.loads(example_body(model))
    return document


def example_body(model: ModelView) -> bytes:
    """Return an inference request for ``model``. Takes about 10 ms per million elements.

    Raises `Unsupported` if there is none.
    """
    if reason := why_no_example(model):
        raise Unsupported(f"model '{model.name}' has no example in JSON: {reason}")
    inputs = []
    for name, datatype, shape in _required_inputs(model):
        head = json.dumps({"name": name, "shape": shape, "datatype": datatype})
        values = ",".join([_ZEROS.get(datatype, "0")] * prod(shape))
        inputs.append(f'{head[:-1]}, "data": [{values}]}}')
    more = "".join(f", {json.dumps(key)}: {json.dumps(value)}" for key, value in _more(model).items())
    return f'{{"inputs": [{", ".join(inputs)}]{more}}}'.encode()


def _required_inputs(model: ModelView) -> list[tuple[str, str, list[int]]]:
    """Return name, data type and shape of each required input, or of all inputs if all are optional."""
    optional = {each.name for each in model.config.input if each.optional}
    declared: Sequence[Mapping[str, Any]] = model.metadata["inputs"]
    needed = [each for each in declared if each["name"] not in optional] or declared
    return [(each["name"], each["datatype"], [1 if size < 0 else size for size in each["shape"]]) for each in needed]


def _more(model: ModelView) -> dict[str, Any]:
    """Return the further members of the request."""
    parameters: dict[str, Any] = {}
    if model.config.HasField("sequence_batching"):  # a sequence of one request
        parameters |= {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
    if any(each["datatype"] in _BINARY_ONLY for each in model.metadata["outputs"]):
        parameters["binary_data_output"] = True
    return {"parameters": parameters} if parameters else {}
