"""``/v1/models``: the language models; ``/health``: the state of the server."""

from __future__ import annotations

from typing import Any

import orjson

from headrace import ExtensionOperation, HttpCall, HttpReply, Operation, PermissionDenied
from headrace_openai.catalog import LanguageModel
from headrace_openai.openai_route import OpenAiRoute, json_answer, request_id

_METADATA = ExtensionOperation("openai_models", "metadata", has_parts=True)


class LanguageModelList(OpenAiRoute):
    """The language models of this server, in OpenAI's form"""

    name = "GET /v1/models"
    operation = _METADATA

    async def answer(self, call: HttpCall) -> HttpReply:
        models = [_document(model) for model in self.extension.models.all() if await self._may_see(call, model.name)]
        return json_answer(orjson.dumps({"object": "list", "data": models}), request_id(call.request))

    async def _may_see(self, call: HttpCall, name: str) -> bool:
        """Return True if this caller may read the metadata of the model ``name``."""
        if self.engine.admission is None:
            return True
        caller = call.caller.for_another_operation()
        try:
            await self.engine.admit(caller, Operation.MODEL_METADATA, name)
        except PermissionDenied:
            return False
        caller.end()
        return True


class LanguageModelDescription(OpenAiRoute):
    """One language model, in OpenAI's form"""

    name = "GET /v1/models/{name}"
    operation = _METADATA

    async def answer(self, call: HttpCall) -> HttpReply:
        model = self.extension.models.find(call.values["name"])
        return json_answer(orjson.dumps(_document(model)), request_id(call.request))


class ServerReadiness(OpenAiRoute):
    """200 if the server is ready, as vLLM's own server answers: clients such as GuideLLM ask it first"""

    name = "GET /health"
    operation = Operation.READY

    async def answer(self, call: HttpCall) -> HttpReply:
        return HttpReply(200 if await self.engine.check_ready() else 503, [], [])


class FrontendReadiness(ServerReadiness):
    """The same, on the path of Triton's OpenAI frontend, which probes use"""

    name = "GET /health/ready"


def _document(model: LanguageModel) -> dict[str, Any]:
    owner = model.view.platform or "headrace"
    return {
        "id": model.name, "object": "model", "created": model.found_s, "owned_by": owner, "task": model.task.value
    }  # fmt: skip
