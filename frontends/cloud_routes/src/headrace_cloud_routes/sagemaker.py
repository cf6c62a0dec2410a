"""The routes of SageMaker (docs/spec/behaviours.md section 12.5): ping, invocations, and several models."""

from __future__ import annotations

import os
import re

from headrace import ConfigError, Engine, Forwarded, ForwardingPort, HeadraceError, HttpReply, HttpRequest
from headrace_cloud_routes.binary_content import BinaryContent
from headrace_cloud_routes.multi_model import (
    AskUnknownModel,
    DescribeModel,
    ListModels,
    LoadModel,
    Models,
    UnloadModel,
)

_CONTENT = BinaryContent(b"application/vnd.sagemaker-triton.binary+json")
_TARGET = b"x-amzn-sagemaker-target-model"
_INVOKE = re.compile(r"/models/([^/]+)/invoke")
_MODEL = re.compile(r"/models/[^/]+")
#: The values of each environment variable, the default first.
_PING_MODES = ("ready", "live")
_INFERENCE_TYPES = ("infer", "generate", "generate_stream")


class SageMaker(ForwardingPort):
    """The port of SageMaker."""

    name = "sagemaker"
    service = "Sagemaker HTTPService"
    routes = (ListModels, DescribeModel, AskUnknownModel, LoadModel, UnloadModel)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.models = Models(engine)
        self._ping = self._model = self._suffix = ""

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_sagemaker

    @property
    def place(self) -> tuple[str, int]:
        return "0.0.0.0", self.engine.options.sagemaker_port

    async def start(self) -> None:
        default = "unspecified_SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"
        self._model = os.environ.get("SAGEMAKER_TRITON_DEFAULT_MODEL_NAME") or default
        self._ping = f"/v2/health/{_choice('SAGEMAKER_TRITON_PING_MODE', _PING_MODES)}"
        self._suffix = _choice("SAGEMAKER_TRITON_INFERENCE_TYPE", _INFERENCE_TYPES)
        await super().start()

    def forward(self, request: HttpRequest) -> Forwarded | HttpReply | None:
        path = request.path
        if path == "/ping":
            return Forwarded(request._replace(path=self._ping))
        if path == "/invocations":
            return self._inference(request, self._model)
        if found := _INVOKE.fullmatch(path):
            return self._invoke(request, found[1])
        if path in ("/models", "/models/"):
            return None if request.method in ("GET", "POST") else HttpReply(400)
        if _MODEL.fullmatch(path):
            return None if request.method in ("GET", "DELETE") else HttpReply(400)
        return HttpReply(400)

    def _invoke(self, request: HttpRequest, name: str) -> Forwarded | HttpReply | None:
        """Return the inference of a model that was loaded over this port, or of one that its caller names beside it."""
        if request.method != "POST":
            return HttpReply(404 if request.method == "GET" else 400)
        if name not in self.models.urls:
            return None
        target = request.headers.get(_TARGET, b"").decode("latin-1")
        forwarded = self._inference(request, name)
        if not target or not self._is_served(target):
            return forwarded
        # Who may not use the target gets what he would get if it were absent.
        return self._inference(request, target)._replace(otherwise=forwarded)

    def _is_served(self, name: str) -> bool:
        try:
            self.engine.resolve(name)
        except HeadraceError:
            return False
        return True

    def _inference(self, request: HttpRequest, model: str) -> Forwarded:
        return _CONTENT.forwarded(request, request.method, f"/v2/models/{model}/{self._suffix}")


def _choice(variable: str, allowed: tuple[str, ...]) -> str:
    """Return the value of an environment variable, by default the first of ``allowed``. Raises `ConfigError`."""
    value = os.environ.get(variable) or allowed[0]
    if value not in allowed:
        raise ConfigError(f"{variable} is '{value}'; it must be one of {', '.join(allowed)}")
    return value
