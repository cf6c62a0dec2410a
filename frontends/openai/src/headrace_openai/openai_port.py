"""A port with OpenAI's routes and no others, for callers that should reach nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from headrace import HeadraceError, HttpPort, HttpReply, HttpRequest, HttpRoute
from headrace_openai.openai_extension import OpenAi
from headrace_openai.openai_options import OpenAiOptions
from headrace_openai.openai_route import refusal


class OpenAiPort(HttpPort):
    """The port of ``--openai-port``. Flags and interceptors for HTTP hold for its callers."""

    name: ClassVar[str] = "openai"
    service: ClassVar[str] = "OpenAI Service"
    routes: ClassVar[Sequence[type[HttpRoute]]] = [part for part in OpenAi.adds if issubclass(part, HttpRoute)]

    @property
    def enabled(self) -> bool:
        return self._settings.port is not None

    @property
    def place(self) -> tuple[str, int]:
        return self._settings.address or self.engine.options.http_address, self._settings.port or 0

    @property
    def transport(self) -> str:
        return "http"

    def make_routes(self) -> Sequence[HttpRoute]:
        (extension,) = [each for each in self.engine.extensions if isinstance(each, OpenAi)]
        return [route(extension) for route in self.routes]

    def refusal(self, error: HeadraceError, usual: HttpReply, request: HttpRequest) -> HttpReply:
        return refusal(error, usual, request)

    @property
    def _settings(self) -> OpenAiOptions:
        return self.engine.options.group(OpenAiOptions)
