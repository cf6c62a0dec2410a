"""The extension ``template`` for Headrace: the inputs and outputs of a model as a plain JSON object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace import (
    BytesTensor,
    Caller,
    Extension,
    ExtensionOperation,
    GrpcMethod,
    HttpCall,
    HttpReply,
    HttpRoute,
    InferRequest,
    InvalidArgument,
    PublishedMetric,
    Tensor,
    hookimpl,
)

OPERATION = ExtensionOperation("template")


class TemplateRoute(HttpRoute):
    name = "POST /v2/models/{name}[/versions/{version}]/template"
    operation = OPERATION
    extension: Template

    async def answer(self, call: HttpCall) -> HttpReply:
        inputs = parse(bytes(call.request.body))
        body = await self.extension.infer(call.values["name"], call.values["version"], inputs, call.caller)
        return HttpReply(200, [(b"Content-Type", b"application/json")], [body])


class TemplateMethod(GrpcMethod):
    name = "/headrace.Template/Ask"
    operation = OPERATION
    extension: Template

    async def answer(self, request: bytes, caller: Caller) -> bytes:
        document = parse(request)
        return await self.extension.infer(str(document.get("model")), "", document.get("inputs"), caller)


class Template(Extension):
    name = "template"
    announces = ("template",)
    adds = (TemplateRoute, TemplateMethod)
    metrics = (PublishedMetric("headrace_template_requests_total", "Requests that were answered.", "counter"),)
    requests = 0

    async def infer(self, model: str, version: str, inputs: Any, caller: Caller) -> bytes:
        specs = self.engine.resolve(model, version).inputs
        if not isinstance(inputs, dict) or not inputs.keys() <= specs.keys():
            raise InvalidArgument(f"the inputs are not an object with some of {', '.join(specs)}")
        try:
            tensors = {name: np.asarray(value, specs[name].datatype.numpy) for name, value in inputs.items()}
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"an input can not be read: {error}") from None
        outputs: dict[str, Any] = {}
        async for response in self.engine.responses(InferRequest(model, tensors, model_version=version), caller):
            outputs |= {name: values(tensor) for name, tensor in response.outputs.items()}
        self.requests += 1
        return json.dumps(outputs, default=lambda text: text.decode(errors="replace")).encode()

    def measure(self) -> Mapping[str, float]:
        return {"headrace_template_requests_total": self.requests}


def values(tensor: Tensor) -> Any:
    return (tensor.to_objects() if isinstance(tensor, BytesTensor) else np.asarray(tensor)).tolist()


def parse(body: bytes) -> Mapping[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:  # it is no JSON, or too deep
        raise InvalidArgument(f"the body is no JSON: {error}") from None
    if not isinstance(document, dict):
        raise InvalidArgument("the body is no JSON object")
    return document


@hookimpl
def register_extensions() -> list[type[Extension]]:
    return [Template]
