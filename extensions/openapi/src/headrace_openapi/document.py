"""The OpenAPI document of a server: its routes, and an inference path for each model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from headrace import HttpRoute, ModelView
from headrace_openapi.examples import INLINE, elements, example, why_no_example
from headrace_openapi.openapi_paths import infer_content, paths_of

#: Bytes of all models together. Those that do not fit are named only by their number.
MAX_BYTES = 8 << 20
#: Bytes of one model.
MAX_MODEL_BYTES = 64 << 10
#: Names that a URL can have as they are. The server does not decode names in paths, and neither does Triton.
_IN_PATHS = re.compile(r"[\w.~!$&'()*+,;=:@-]+", re.ASCII).fullmatch

_TENSOR = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": {"type": "string"},
        "parameters": {"type": "object"},
        "data": {"type": "array"},
    },
}
_COMPONENTS = {
    "schemas": {
        "Tensor": _TENSOR,
        "InferenceRequest": {
            "type": "object",
            "required": ["inputs"],
            "properties": {
                "id": {"type": "string"},
                "parameters": {"type": "object"},
                "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
                "outputs": {
                    "type": "array",
                    "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
                },
            },
        },
        "InferenceResponse": {
            "type": "object",
            "properties": {
                "id": {"type": "string"},
                "model_name": {"type": "string"},
                "model_version": {"type": "string"},
                "parameters": {"type": "object"},
                "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
            },
        },
        "Error": {"type": "object", "properties": {"error": {"type": "string"}}},
    },
    "responses": {
        "Inference": {
            "description": "The outputs of the model",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/InferenceResponse"}}},
        },
        "Error": {
            "description": "The request is refused or has failed",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
        },
    },
}


def write_document(name: str, version: str, routes: Iterable[type[HttpRoute]], models: Sequence[ModelView]) -> bytes:
    """Return the document as JSON. Takes about 0.1 ms per model, so it is called on a thread."""
    paths = paths_of(routes)
    left_bytes, left_out, unnamed = MAX_BYTES, 0, 0
    for model in models:
        if not _IN_PATHS(model.name):
            unnamed += 1
            continue
        path, item = _model_path(model)
        size = len(json.dumps(item))
        if size > min(left_bytes, MAX_MODEL_BYTES):
            left_out += 1
            continue
        left_bytes -= size
        paths[path] = item
    info = {"title": name, "version": version, "description": f"The HTTP routes of this server. {_models(models)}"}
    if left_out:
        info["description"] += f" {left_out} of them do not fit into this document."
    if unnamed:
        info["description"] += f" {unnamed} of them have names that no path can have."
    return json.dumps({"openapi": "3.1.0", "info": info, "paths": paths, "components": _COMPONENTS}).encode()


def _models(models: Sequence[ModelView]) -> str:
    return f"It serves {len(models)} model{'s' * (len(models) != 1)}."


def _model_path(model: ModelView) -> tuple[str, dict[str, Any]]:
    """Return the path and the path item of an inference with ``model``."""
    name = model.name
    operation: dict[str, Any] = {
        "operationId": f"infer_{name}",
        "summary": f"Run the model '{model.name}'",
        "tags": ["models"],
        "description": _description(model),
        "requestBody": {"required": True, "content": infer_content(**_examples(model, name))},
        "responses": {
            "200": {"$ref": "#/components/responses/Inference"},
            "default": {"$ref": "#/components/responses/Error"},
        },
    }
    return f"/v2/models/{name}/infer", {"post": operation}


def _examples(model: ModelView, name: str) -> dict[str, Any]:
    if why_no_example(model):
        return {}
    if elements(model) <= INLINE:
        return {"example": example(model)}
    return {"examples": {"zeros": {"externalValue": f"/openapi/models/{name}/example.json"}}}


def _description(model: ModelView) -> str:
    """Return the inputs and outputs of ``model`` as Markdown."""
    lines = [f"Version {model.version}, {model.platform or model.config.backend}."]
    for word in ("inputs", "outputs"):
        lines += ["", f"{word.capitalize()}:", ""]
        for each in model.metadata[word]:
            lines.append(f"- `{each['name']}`: {each['datatype']} {list(each['shape'])}")
    if reason := why_no_example(model):
        lines += ["", f"There is no example: {reason}."]
    return "\n".join(lines)
