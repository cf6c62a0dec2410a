"""The routes of Vertex AI (docs/spec/behaviours.md section 12.6): health, predictions, and redirection by a header."""

from __future__ import annotations

import os
import re

from headrace import ConfigError, Engine, Forwarded, ForwardingPort, HttpReply, HttpRequest, PermissionDenied
from headrace_cloud_routes.binary_content import BinaryContent

_CONTENT = BinaryContent(b"application/vnd.vertex-ai-triton.binary+json", is_answered=False)
_REDIRECT = b"x-vertex-ai-triton-redirect"
_MODEL = r"v2/models/[^/]+(/versions/[0-9]+)?"
#: The paths that the header may name, by their method. Triton 2.51 knows no others, but for those that are refused.
_REDIRECTS = {
    "GET": re.compile(
        rf"v2|metrics|v2/health/(live|ready)|v2/models/stats|{_MODEL}(/(config|stats|ready))?"
        r"|v2/(system|cuda)sharedmemory(/region/[^/]+)?/status"
    ),
    "POST": re.compile(rf"{_MODEL}/infer|v2/repository/index"),
}
#: What a redirection must not do: it changes the server, and every caller of predictions could.
_REFUSED = re.compile(
    r"v2/repository/models/[^/]+/(load|unload)|v2/(system|cuda)sharedmemory(/region/[^/]+)?/(register|unregister)"
)


class VertexAi(ForwardingPort):
    """The port of Vertex AI. Its paths are those of ``AIP_HEALTH_ROUTE`` and ``AIP_PREDICT_ROUTE``."""

    name = "vertex_ai"
    service = "Vertex AI HTTPService"

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._health = self._predict = self._model = ""

    @property
    def enabled(self) -> bool:
        return self.engine.options.allow_vertex_ai

    @property
    def place(self) -> tuple[str, int]:
        return "0.0.0.0", self.engine.options.vertex_ai_port

    async def start(self) -> None:
        self._predict, self._health = _route("AIP_PREDICT_ROUTE"), _route("AIP_HEALTH_ROUTE")
        self._model = self.engine.options.vertex_ai_default_model
        if not self.engine.is_loading:
            self._model = self._default_model()
        else:
            self.engine.when_ready(self._check_late)
        await super().start()

    def _check_late(self) -> None:
        self._model = self._default_model()

    def _default_model(self) -> str:
        """Return the model of predictions. Raises `ConfigError` in Triton's words if it is not there."""
        wanted = self.engine.options.vertex_ai_default_model
        ready = {entry.name for entry in self.engine.index(ready_only=True)}
        if wanted and wanted not in ready:
            raise ConfigError(f"Expect the default model '{wanted}' is loaded")
        if not wanted and len(ready) != 1:
            raise ConfigError(
                "Expect the model repository contains only a single model if default model is not specified"
            )
        return wanted or ready.pop()

    def forward(self, request: HttpRequest) -> Forwarded | HttpReply | None:
        if request.path == self._health:
            return Forwarded(request._replace(path="/v2/health/ready"))
        if request.path != self._predict:
            return HttpReply(400)
        redirect = request.headers.get(_REDIRECT, b"").decode("latin-1")
        if not redirect or request.method != "POST":
            return _CONTENT.forwarded(request, request.method, f"/v2/models/{self._model}/infer")
        if _REFUSED.fullmatch(redirect):
            raise PermissionDenied(f"'{redirect}' is not allowed as a redirection of predictions")
        for method, pattern in _REDIRECTS.items():
            if pattern.fullmatch(redirect):
                return _CONTENT.forwarded(request, method, f"/{redirect}")
        return HttpReply(400)


def _route(variable: str) -> str:
    """Return the path in an environment variable. Raises `ConfigError`."""
    path = os.environ.get(variable, "")
    if not path:
        raise ConfigError(f"{variable} is not defined for Vertex AI endpoint")
    return path
