"""The handlers of everything except inference: health, metadata, config, statistics; index, load and unload.

Source: docs/spec/behaviours.md sections 1.2, 1.6, 5.4.
"""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Coroutine, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.errors import Code, InvalidArgument, Unavailable, Unsupported
from headrace.frontends.access import ModelFilesRule
from headrace.frontends.failures import without_paths
from headrace.off_loop import LARGE_BYTES
from headrace_http.documents import as_boolean, as_object, as_string, malformed, parse_object
from headrace_http.large_documents import LongString, read_object
from headrace_http.message import HttpReply, HttpRequest, Reply, json_reply, json_type_reply
from headrace_http.url_paths import PathTarget

if TYPE_CHECKING:
    from headrace.engine import Caller, Engine, IndexEntry


class DescriptionHandlers:
    """Describe the server and its models. Each handler returns the reply, or an awaitable of it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def server(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        metadata = self._engine.metadata()
        return json_reply({"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)})

    def live(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        return self._health(request, "live", self._engine.live)

    def ready(self, request: HttpRequest, target: PathTarget) -> HttpReply | Coroutine[Any, Any, HttpReply]:
        if self._engine.has_checks:
            return self._check_ready(request)
        return self._health(request, "ready", self._engine.ready)

    def model(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        return json_reply(self._engine.model_metadata(target.name, target.version))

    def model_ready(self, request: HttpRequest, target: PathTarget) -> HttpReply | Coroutine[Any, Any, HttpReply]:
        is_alive = self._engine.is_model_alive(target.name, target.version)
        if is_alive is None:
            return self._check_model(request, target)
        return self._model_health(request, target, is_alive)

    def config(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        from headrace.config import config_json

        return json_reply(config_json.config_to_json(self._engine.resolve(target.name, target.version).config))

    def statistics(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        return json_reply({"model_stats": self._engine.statistics(target.name, target.version)})

    def explain(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        return json_reply(self._engine.explain(target.name, target.version))

    async def _check_ready(self, request: HttpRequest) -> HttpReply:
        return self._health(request, "ready", await self._engine.check_ready())

    async def _check_model(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        return self._model_health(request, target, await self._engine.check_model(target.name, target.version))

    def _model_health(self, request: HttpRequest, target: PathTarget, is_ready: bool) -> HttpReply:
        if not is_ready:
            why = self._engine.why_not_alive(target.name, target.version)
            raise InvalidArgument("Model version not ready" + (why and f": {why}"))
        return _health_reply(request, 200, {"name": target.name, "ready": True})

    def _health(self, request: HttpRequest, what: str, is_well: bool) -> HttpReply:
        if self._engine.exiting:
            raise Unavailable("Server exiting")
        if not is_well and (why := self._engine.why_not_alive()):
            raise InvalidArgument(why)
        return _health_reply(request, 200 if is_well else 400, {what: is_well})


def _health_reply(request: HttpRequest, status: int, body: dict[str, Any]) -> HttpReply:
    """Return ``body``, as the Open Inference Protocol has it, to a client whose ``Accept`` names JSON; to any other no
    body, as Triton: scripts that call curl, which accepts everything, print what they get."""
    is_asked = b"application/json" in request.headers.get(b"accept", b"")
    return json_reply(body, status) if is_asked else HttpReply(status)


#: The start of an `index` document whose ``ready`` is an array or an object, without blanks.
_NESTED_READY = (b'{"ready":[', b'{"ready":{')
_HEAD_BYTES = 256


class RepositoryHandlers:
    """The model repository. All handlers run as tasks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        restricted = "model-repository" in engine.options.http_restricted_api
        self._model_files_rule = ModelFilesRule(engine.options.model_files_from, restricted, "--http-restricted-api")

    async def index(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        try:
            ready_only = (await self._document(request)).get("ready", False)
        except InvalidArgument as error:  # a nested value must be a boolean, whatever its depth
            if error.code is Code.INTERNAL or not _begins_nested(request.body):
                raise
            ready_only = None
        if type(ready_only) is not bool:
            raise InvalidArgument("Invalid value for 'ready': expected a boolean")
        return json_reply([_entry(entry) for entry in await self._engine.list_repository(ready_only)])

    async def load(self, request: HttpRequest, target: PathTarget, asking: Reply) -> HttpReply:
        """Load a model for the caller who gets ``asking``."""
        _refuse_repository(target)
        given = (await self._document(request)).get("parameters", {})
        if type(given) is not dict:
            raise malformed("attempt to get members for non-object")
        peer = getattr(asking, "peer", "")
        self._model_files_rule.check(given, peer, lambda name: request.headers.get(name.encode()))
        if request.body.nbytes <= LARGE_BYTES:
            values = _load_values(given)
        else:
            values = await self._engine.off_loop_work.run(partial(_load_values, given))
        _note(asking, sizes={name: len(value) for name, value in values.items()})
        await self._engine.load(target.name, values)
        return json_type_reply()

    async def _document(self, request: HttpRequest) -> dict[str, Any]:
        if request.body.nbytes <= LARGE_BYTES:
            return parse_object(request.body)
        return await self._engine.off_loop_work.run(partial(read_object, request.body))

    async def unload(self, request: HttpRequest, target: PathTarget, asking: Reply) -> HttpReply:
        _refuse_repository(target)
        given = as_object((await self._document(request)).get("parameters", {}), "parameters")
        dependents = as_boolean(given.get("unload_dependents", False), "unload_dependents")
        _note(asking, unload_dependents=dependents)
        await self._engine.unload(target.name, dependents)
        return json_type_reply()


def _entry(entry: IndexEntry) -> dict[str, str | int]:
    fields: dict[str, str | int]
    fields = {"version": entry.version, "state": entry.state, "reason": without_paths(entry.reason)}
    fields["memory_bytes"] = entry.memory_bytes
    return {"name": entry.name, **{key: value for key, value in fields.items() if value}}


def _note(asking: Reply, **details: Any) -> None:
    """Note what the operation is asked to change. ``asking`` has a caller if the server has interceptors."""
    caller: Caller | None = getattr(asking, "caller", None)
    if caller is not None:
        caller.note(**details)


def _refuse_repository(target: PathTarget) -> None:
    if target.repository:
        raise Unsupported("'repository_name' specification is not supported")


def _load_values(given: dict[str, Any]) -> dict[str, str | bytes]:
    return {name: _load_value(name, value) for name, value in given.items()}


def _load_value(name: str, value: Any) -> str | bytes:
    """Return ``config`` as text, or ``file:...`` as the bytes of its base64."""
    parts = value.parts() if isinstance(value, LongString) else iter((as_string(value, None),))
    if name == "config":
        return "".join(parts)
    if not name.startswith("file:"):
        raise malformed("unexpected error on creating Triton parameter")
    try:
        return b"".join(_decode(parts))
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"load parameter '{name}' is not base64: {error}") from None


def _decode(parts: Iterable[str]) -> Iterator[bytes]:
    """Yield the bytes of base64 text that comes in ``parts``. Other threads can run between two parts."""
    left, is_padded = "", False
    for part in parts:
        left += part
        end = len(left) - len(left) % 4
        if is_padded or 0 <= left.find("=") < len(left) - 2:
            raise ValueError("Excess data after padding")
        is_padded = "=" in left[:end]
        yield b64decode(left[:end], validate=True)
        left = left[end:]
    yield b64decode(left, validate=True)


def _begins_nested(body: memoryview) -> bool:
    return b"".join(body[:_HEAD_BYTES].tobytes().split()).startswith(_NESTED_READY)
