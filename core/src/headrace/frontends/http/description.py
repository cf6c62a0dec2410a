"""What the server and its models are: health, metadata, config, statistics (docs/spec/behaviours.md
sections 1.2 and 1.6). All answers are made on the spot."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidArgument, Unavailable
from headrace.frontends.http.message import HttpReply, HttpRequest, json_reply
from headrace.frontends.http.path_target import PathTarget

if TYPE_CHECKING:
    from headrace.engine import Engine


class Description:
    """The handlers; each takes a request and its target and returns the reply, or what to await for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def server(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        metadata = self._engine.metadata()
        return json_reply({"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)})

    def live(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        return self._health(self._engine.live)

    def ready(self, request: HttpRequest, target: PathTarget) -> HttpReply | Coroutine[Any, Any, HttpReply]:
        return self._check_ready() if self._engine.has_checks else self._health(self._engine.ready)

    def model(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        return json_reply(self._engine.model_metadata(target.name, target.version))

    def model_ready(self, request: HttpRequest, target: PathTarget) -> HttpReply | Coroutine[Any, Any, HttpReply]:
        is_alive = self._engine.is_model_alive(target.name, target.version)
        return self._check_model(target) if is_alive is None else _model_health(is_alive)

    def config(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        from headrace.config import json_form

        return json_reply(json_form.config_to_json(self._engine.resolve(target.name, target.version).config))

    def statistics(self, request: HttpRequest, target: PathTarget) -> HttpReply:
        return json_reply({"model_stats": self._engine.statistics(target.name, target.version)})

    async def _check_ready(self) -> HttpReply:
        return self._health(await self._engine.check_ready())

    async def _check_model(self, target: PathTarget) -> HttpReply:
        return _model_health(await self._engine.check_model(target.name, target.version))

    def _health(self, is_well: bool) -> HttpReply:
        if self._engine.exiting:
            raise Unavailable("Server exiting")
        return HttpReply(200 if is_well else 400)


def _model_health(is_ready: bool) -> HttpReply:
    if not is_ready:
        raise InvalidArgument("Model version not ready")
    return HttpReply(200)
