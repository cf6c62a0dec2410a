"""The routes of the description. The document is written on a thread at a request, and cached until a model changes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace import (
    Addition,
    Engine,
    Extension,
    ExtensionOperation,
    FileRoute,
    HeadraceError,
    HttpCall,
    HttpReply,
    HttpRoute,
    ModelView,
    OptionGroup,
    ServedModel,
    hookimpl,
)
from headrace_openapi.document import write_document
from headrace_openapi.examples import example_body

#: Reads the description. It names all models, so `--http-restricted-api=metadata:...` restricts it.
OPERATION = ExtensionOperation("openapi", "metadata")

_JSON = ((b"Content-Type", b"application/json"),)


@dataclass(frozen=True)
class OpenApiOptions(OptionGroup):
    """The description of the HTTP routes, `/openapi.json`."""

    name: ClassVar[str] = "openapi"
    docs: bool = field(default=False, metadata={"help": "Show the description in a browser, at /docs."})


class DescriptionRoute(HttpRoute):
    """The description of this server in the form of OpenAPI 3.1"""

    name = "GET /openapi.json"
    operation = OPERATION
    extension: OpenApi

    async def answer(self, call: HttpCall) -> HttpReply:
        return HttpReply(200, _JSON, [await self.extension.document()])


class ExampleRoute(HttpRoute):
    """An inference request for a model with many inputs, as JSON"""

    name = "GET /openapi/models/{name}[/versions/{version}]/example.json"
    operation = OPERATION

    async def answer(self, call: HttpCall) -> HttpReply:
        model = self.engine.resolve(call.values["name"], call.values["version"])
        return HttpReply(200, _JSON, [await asyncio.to_thread(example_body, model)])


class OpenApi(Extension):
    """Writes the document once per change of the models, for all waiting callers."""

    name: ClassVar[str] = "openapi"
    adds: ClassVar[Sequence[type[Addition]]] = (DescriptionRoute, ExampleRoute)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._lock = asyncio.Lock()
        self._cached: tuple[object, bytes] = (None, b"")
        #: Another object after each change of the models.
        self._last_change = object()

    @hookimpl
    def model_loaded(self, model: ServedModel) -> None:
        self._last_change = object()

    @hookimpl
    def model_unloaded(self, model: ServedModel) -> None:
        self._last_change = object()

    async def document(self) -> bytes:
        """Return the description as JSON. Raises `Unavailable` before the end of the start."""
        async with self._lock:
            state = self._state()
            if self._cached[0] != state:
                models = self._models()
                document = await asyncio.to_thread(
                    write_document, self.engine.options.id, self.engine.version, self._routes(), models
                )
                self._cached = (state, document)
            return self._cached[1]

    def _state(self) -> tuple[Any, ...]:
        """Return what is equal as long as the document is right."""
        return (self._last_change, *self.engine.index(ready_only=True))

    def _models(self) -> list[ModelView]:
        """Return the latest version of each model."""
        found = []
        for name in dict.fromkeys(entry.name for entry in self.engine.index(ready_only=True)):
            try:
                found.append(self.engine.resolve(name))
            except HeadraceError:  # it is being unloaded
                continue
        return found

    def _routes(self) -> list[type[HttpRoute]]:
        added = (part for extension in self.engine.extensions for part in extension.adds)
        return [part for part in added if issubclass(part, HttpRoute)]


class PageRoute(FileRoute):
    """The description for a browser"""

    name, file, operation = "GET /docs", "viewer/index.html", OPERATION


class ScriptRoute(FileRoute):
    """The script of the page"""

    name, file, operation = "GET /docs/viewer.js", "viewer/viewer.js", OPERATION


class StyleRoute(FileRoute):
    """The style of the page"""

    name, file, operation = "GET /docs/viewer.css", "viewer/viewer.css", OPERATION


class OpenApiDocs(Extension):
    """The viewer, with ``--openapi-docs=true``."""

    name: ClassVar[str] = "openapi-docs"
    adds: ClassVar[Sequence[type[Addition]]] = (PageRoute, ScriptRoute, StyleRoute)

    @property
    def enabled(self) -> bool:
        return self.engine.options.group(OpenApiOptions).docs
