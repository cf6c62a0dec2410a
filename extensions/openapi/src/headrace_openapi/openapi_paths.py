"""The HTTP routes of a server as paths of OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from headrace import HttpRoute, Operation

_PLACEHOLDER = re.compile(r"{(\w+)}")
#: A short description of each operation.
_SUMMARIES: dict[str, str] = {
    Operation.INFER: "Run a model",
    Operation.GENERATE: "Run a model with a flat JSON object",
    Operation.LIVE: "Is the server running?",
    Operation.READY: "Is the server ready for requests?",
    Operation.MODEL_READY: "Is the model ready for requests?",
    Operation.SERVER_METADATA: "Name, version and extensions of the server",
    Operation.MODEL_METADATA: "Versions, inputs and outputs of the model",
    Operation.MODEL_CONFIG: "The complete configuration of the model",
    Operation.STATISTICS: "Statistics of requests and executions",
    Operation.EXPLAIN: "Why the last batches ran when they did",
    Operation.INDEX: "All models and their states",
    Operation.LOAD: "Load or reload the model",
    Operation.UNLOAD: "Unload the model",
    Operation.TRACE_SETTINGS: "Settings of traces",
    Operation.LOG_SETTINGS: "Settings of the log",
}
_ERROR = {"$ref": "#/components/responses/Error"}


def paths_of(routes: Iterable[type[HttpRoute]]) -> dict[str, Any]:
    """Return the path items of ``routes``: two for a path with an optional part."""
    items: dict[str, Any] = {}
    for route in routes:
        method, _, path = route.name.partition(" ")
        for text in _variants(path):
            item = items.setdefault(text, {})
            if names := _PLACEHOLDER.findall(text):
                item["parameters"] = [_parameter(name) for name in names]
            item[method.lower()] = _operation(route, method, text)
    return items


def _variants(path: str) -> list[str]:
    """Return ``path`` without and with its part in brackets."""
    head, bracket, rest = path.partition("[")
    if not bracket:
        return [path]
    inside, _, tail = rest.partition("]")
    return [variant for text in (head + tail, head + inside + tail) for variant in _variants(text)]


def _parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if name == "version":
        schema["pattern"] = "^[0-9]+$"
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _operation(route: type[HttpRoute], method: str, path: str) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method.lower()} {path}").strip("_"),
        "summary": summary_of(route),
        "tags": [str(route.operation)],
        "responses": {"200": {"description": "Success"}, "default": _ERROR},
    }
    if route.operation is Operation.INFER and path.endswith("/infer"):
        operation["requestBody"] = {"required": True, "content": infer_content()}
        operation["responses"]["200"] = {"$ref": "#/components/responses/Inference"}
    elif method in ("POST", "PUT", "PATCH"):
        operation["requestBody"] = {"content": {"application/json": {"schema": {"type": "object"}}}}
    return {**operation, **route.openapi}


def infer_content(**more: Any) -> dict[str, Any]:
    """Return the content of an inference request."""
    return {"application/json": {"schema": {"$ref": "#/components/schemas/InferenceRequest"}, **more}}


def summary_of(route: type[HttpRoute]) -> str:
    """Return the first line of the docstring of ``route``, or the description of its operation."""
    own = vars(route).get("__doc__")
    line = own.strip().partition("\n")[0] if own else ""
    return line or _SUMMARIES.get(route.operation, str(route.operation))
