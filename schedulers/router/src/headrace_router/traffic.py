"""The extension ``traffic``: how the requests to a router are split, read and changed while the server runs.

::

    GET /v2/models/digits/traffic
    PUT /v2/models/digits/traffic    {"weights": {"digits:1": 80, "digits:2": 20}, "shadow": 0.5}
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace import (
    Addition,
    Caller,
    Engine,
    Extension,
    ExtensionOperation,
    GrpcMethod,
    HeadraceError,
    HttpCall,
    HttpReply,
    HttpRoute,
    InvalidArgument,
    ModelView,
    NotFound,
    one_line,
)
from headrace_router.router_options import RouterOptions

if TYPE_CHECKING:
    from google.protobuf.struct_pb2 import Struct, Value

    from headrace_router.board import Change
    from headrace_router.router_scheduler import RouterScheduler

log = logging.getLogger("headrace.router")
_JSON = ((b"Content-Type", b"application/json"),)
#: A change names at most 64 targets.
_MAX_BYTES = 1 << 16
_KNOWN = ("weights", "shadow")

READ = ExtensionOperation("traffic", "statistics")
CHANGE = ExtensionOperation("traffic_change", "model-repository")


class ReadTraffic(HttpRoute):
    name = "GET /v2/models/{name}[/versions/{version}]/traffic"
    operation = READ
    extension: Traffic

    async def answer(self, call: HttpCall) -> HttpReply:
        found = document(*self.extension.find(call.values["name"], call.values["version"]))
        body = json.dumps(found, separators=(",", ":"), ensure_ascii=False).encode()
        return HttpReply(200, _JSON, [body])


class ChangeTraffic(ReadTraffic):
    name = "PUT /v2/models/{name}[/versions/{version}]/traffic"
    operation = CHANGE

    async def answer(self, call: HttpCall) -> HttpReply:
        view, router = self.extension.find(call.values["name"], call.values["version"])
        change = parse(call.request.body)
        call.caller.note(version=view.version, traffic=change)
        await self.extension.change(view, router, change)
        return await super().answer(call)


class ReadTrafficMethod(GrpcMethod):
    """``{"model": "digits"}``, and a ``version`` if need be, to the state of the router. Both are `Struct`."""

    name = "/headrace.Traffic/Read"
    operation = READ
    extension: Traffic

    @staticmethod
    def parse(message: bytes) -> dict[str, Any]:
        from google.protobuf.struct_pb2 import Struct

        if len(message) > _MAX_BYTES:
            raise InvalidArgument(f"the message has {len(message)} bytes; the limit is {_MAX_BYTES}")
        return plain(Struct.FromString(message))

    async def answer(self, request: dict[str, Any], caller: Caller) -> Struct:
        from google.protobuf.struct_pb2 import Struct

        state = Struct()
        state.update(document(*self._find(request)))
        return state

    def _find(self, request: Mapping[str, Any]) -> tuple[ModelView, RouterScheduler]:
        name, version = request.get("model"), request.get("version", "")
        if not isinstance(name, str) or not isinstance(version, str):
            raise InvalidArgument("'model' and 'version' are strings, and 'model' is required")
        return self.extension.find(name, version)


class ChangeTrafficMethod(ReadTrafficMethod):
    """The same with ``weights`` or ``shadow``, as in the body of ``PUT``."""

    name = "/headrace.Traffic/Change"
    operation = CHANGE

    async def answer(self, request: dict[str, Any], caller: Caller) -> Struct:
        changes = {key: value for key, value in request.items() if key not in ("model", "version")}
        view, router = self._find(request)
        caller.note(version=view.version, traffic=changes)
        await self.extension.change(view, router, changes)
        return await super().answer(request, caller)


class Traffic(Extension):
    name = "traffic"
    announces = ("traffic",)
    adds: ClassVar[tuple[type[Addition], ...]] = (ReadTraffic, ChangeTraffic, ReadTrafficMethod, ChangeTrafficMethod)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._board = engine.options.group(RouterOptions).board
        self._board.publish = self._publish
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, name: str, version: str) -> tuple[ModelView, RouterScheduler]:
        """Return a router. Raises as `headrace.Engine.resolve`, and `NotFound` for a model that is none."""
        from headrace_router.router_scheduler import router_of

        view = self.engine.resolve(name, version)
        router = router_of(view.config)
        if router is None:
            raise NotFound(f"model '{one_line(name)}' is no router: its traffic goes to itself")
        return view, router

    async def change(self, view: ModelView, router: RouterScheduler, changes: Mapping[str, Any]) -> None:
        """Change the traffic of ``router`` in all workers. Raises `InvalidArgument` before anything changes.

        New weights end all rollbacks.
        """
        from headrace_router.table_parameters import check_fraction, check_weights, shown

        state = router.state()
        if unknown := sorted(changes.keys() - _KNOWN):
            raise InvalidArgument(f"unknown key '{shown(unknown[0])}'; known: {', '.join(_KNOWN)}")
        if not changes:
            raise InvalidArgument(f"the body changes nothing; known: {', '.join(_KNOWN)}")
        if "weights" in changes:
            weights = changes["weights"]
            if not isinstance(weights, dict):
                raise InvalidArgument("'weights' is no object that maps each target to its weight")
            try:
                state["weights"], state["rolled_back"] = check_weights(weights, router.table.labels), {}
            except ValueError as error:
                raise InvalidArgument(f"'weights': {error}") from None
        if "shadow" in changes:
            if router.shadow is None:
                raise InvalidArgument("'shadow': the router has none; name one by the parameter 'scheduler.shadow'")
            try:
                state["shadow"] = check_fraction(changes["shadow"])
            except ValueError as error:
                raise InvalidArgument(f"'shadow': {error}") from None
        await self._share({"model": view.name, "version": str(view.version), "table": router.written, "state": state})

    async def _share(self, change: Change) -> None:
        await self.engine.share(self, f"{change['model']}/{change['version']}", change)

    def _publish(self, change: Change) -> None:
        task = asyncio.get_running_loop().create_task(self._publishing(change))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _publishing(self, change: Change) -> None:
        try:
            await self._share(change)
        except HeadraceError as error:
            log.error("the rollback of router '%s' reached no other worker: %s", change["model"], error.message)

    async def apply(self, change: Change) -> None:
        self._board.store(change)
        try:
            _, router = self.find(change["model"], change["version"])
        except HeadraceError:  # a worker that starts: the change is applied when the router is loaded
            return
        if change["table"] == router.written:
            router.apply(change["state"])

    def close(self) -> None:
        self._board.publish = None
        for task in tuple(self._tasks):
            task.cancel()


def plain(struct: Struct) -> dict[str, Any]:
    """Return ``struct`` as JSON values. NaN stays what it is, unlike in ``json_format``: the check names it."""
    return {key: _plain_value(value) for key, value in struct.fields.items()}


def _plain_value(value: Value) -> Any:
    kind = value.WhichOneof("kind")
    if kind == "struct_value":
        return plain(value.struct_value)
    if kind == "list_value":
        return [_plain_value(each) for each in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def document(view: ModelView, router: RouterScheduler) -> dict[str, Any]:
    """Return the state of a router, as JSON."""
    return {"model": view.name, "version": str(view.version), **router.status()}


def parse(body: memoryview) -> Mapping[str, Any]:
    """Return the JSON object in ``body``. Raises `InvalidArgument`."""
    from headrace_router.table_parameters import shown

    if len(body) > _MAX_BYTES:
        raise InvalidArgument(f"the body has {len(body)} bytes; the limit is {_MAX_BYTES}")
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
