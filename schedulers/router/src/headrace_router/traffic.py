"""The extension ``traffic``: how the requests to a router are split, read and changed while the server runs.

::

    GET /v2/models/digits/traffic
    PUT /v2/models/digits/traffic    {"weights": {"digits:1": 80, "digits:2": 20}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from headrace import (
    Addition,
    Extension,
    ExtensionOperation,
    HttpCall,
    HttpReply,
    HttpRoute,
    InvalidArgument,
    ModelView,
    NotFound,
    one_line,
)
from headrace_router.router_options import RouterOptions
from headrace_router.router_scheduler import RouterScheduler, router_of
from headrace_router.routing_table import check_weights, shown

_JSON = ((b"Content-Type", b"application/json"),)
#: A change names at most 64 targets.
_MOST_BYTES = 1 << 16
_KNOWN = ("weights",)

READ = ExtensionOperation("traffic", "statistics")
CHANGE = ExtensionOperation("traffic_change", "model-repository")


class ReadTraffic(HttpRoute):
    name = "GET /v2/models/{name}[/versions/{version}]/traffic"
    operation = READ
    extension: Traffic

    async def answer(self, call: HttpCall) -> HttpReply:
        view, router = self.extension.find(call.values["name"], call.values["version"])
        body = json.dumps(document(view, router), separators=(",", ":"), ensure_ascii=False).encode()
        return HttpReply(200, _JSON, [body])


class ChangeTraffic(ReadTraffic):
    name = "PUT /v2/models/{name}[/versions/{version}]/traffic"
    operation = CHANGE

    async def answer(self, call: HttpCall) -> HttpReply:
        view, router = self.extension.find(call.values["name"], call.values["version"])
        await self.extension.change(view, router, parse(call.request.body))
        return await super().answer(call)


class Traffic(Extension):
    name = "traffic"
    announces = ("traffic",)
    adds: ClassVar[tuple[type[Addition], ...]] = (ReadTraffic, ChangeTraffic)

    def find(self, name: str, version: str) -> tuple[ModelView, RouterScheduler]:
        """Return a router. Raises as `headrace.Engine.resolve`, and `NotFound` for a model that is none."""
        view = self.engine.resolve(name, version)
        router = router_of(view.config)
        if router is None:
            raise NotFound(f"model '{one_line(name)}' is no router: its traffic goes to itself")
        return view, router

    async def change(self, view: ModelView, router: RouterScheduler, given: Mapping[str, Any]) -> None:
        """Change the traffic of ``router`` in all workers. Raises `InvalidArgument` before anything changes."""
        if unknown := sorted(given.keys() - set(_KNOWN)):
            raise InvalidArgument(f"unknown key '{shown(unknown[0])}'; known: {', '.join(_KNOWN)}")
        if not given:
            raise InvalidArgument(f"the body changes nothing; known: {', '.join(_KNOWN)}")
        change: dict[str, Any] = {"model": view.name, "version": str(view.version), "table": router.written}
        weights = given["weights"]
        if not isinstance(weights, dict):
            raise InvalidArgument("'weights' is no object that maps each target to its weight")
        try:
            change["weights"] = check_weights(weights, router.table.labels)
        except ValueError as error:
            raise InvalidArgument(f"'weights': {error}") from None
        await self.engine.share(self, f"{view.name}/{view.version}", change)

    async def apply(self, change: Mapping[str, Any]) -> None:
        self.engine.options.group(RouterOptions).board.note(change)
        try:
            _, router = self.find(change["model"], change["version"])
        except NotFound:  # a worker that starts: the change is applied when the router is loaded
            return
        if change["table"] == router.written:
            router.apply(change)


def parse(body: memoryview) -> Mapping[str, Any]:
    """Return the JSON object in ``body``. Raises `InvalidArgument`."""
    if len(body) > _MOST_BYTES:
        raise InvalidArgument(f"the body has {len(body)} bytes; the limit is {_MOST_BYTES}")
    try:
        found = json.loads(bytes(body), object_pairs_hook=_unique)
    except _Twice as error:
        raise InvalidArgument(f"the body has the key '{shown(str(error))}' twice") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body is no JSON: {one_line(str(error))}") from None
    if not isinstance(found, dict):
        raise InvalidArgument("the body is no JSON object")
    return found


class _Twice(Exception):
    """A JSON object has a key twice."""


def _unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for key in keys if keys.count(key) > 1))
    return found


def document(view: ModelView, router: RouterScheduler) -> dict[str, Any]:
    """Return how the requests to ``router`` are split, as JSON."""
    return {"model": view.name, "version": str(view.version), **router.status()}
