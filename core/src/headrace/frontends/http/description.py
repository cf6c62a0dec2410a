"""What the server and its models are: health, metadata, config, statistics (docs/spec/behaviours.md
sections 1.2 and 1.6). All answers are made on the spot."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from headrace.errors import InvalidArgument, Unavailable
from headrace.frontends.http.message import HttpReply, HttpRequest, json_reply
from headrace.frontends.http.target import Target
from headrace.messages.spec import Spec
from headrace.telemetry.statistics import Duration

if TYPE_CHECKING:
    from headrace.models.served import ServedModel
    from headrace.server import Server


class Description:
    """The handlers; each takes a request and its target and returns the reply, or what to await for it."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def server(self, request: HttpRequest, target: Target) -> HttpReply:
        metadata = self._server.metadata()
        return json_reply({"name": metadata.name, "version": metadata.version, "extensions": list(metadata.extensions)})

    def live(self, request: HttpRequest, target: Target) -> HttpReply:
        return self._health(self._server.live)

    def ready(self, request: HttpRequest, target: Target) -> HttpReply | Coroutine[Any, Any, HttpReply]:
        return self._check_ready() if self._server.has_checks else self._health(self._server.ready)

    def model(self, request: HttpRequest, target: Target) -> HttpReply:
        model = self._server.resolve(target.name, target.version)
        versions = [model.version] if target.version else self._server.ready_versions(target.name)
        return json_reply(
            {
                "name": model.name,
                "versions": [str(version) for version in versions],
                "platform": model.platform,
                "inputs": _tensors(model, model.inputs),
                "outputs": _tensors(model, model.outputs),
            }
        )

    def model_ready(self, request: HttpRequest, target: Target) -> HttpReply | Coroutine[Any, Any, HttpReply]:
        model = self._server.resolve(target.name, target.version)
        return self._check_model(model) if model.has_checks else _model_health(model.ready)

    def config(self, request: HttpRequest, target: Target) -> HttpReply:
        from headrace.config import json_form

        return json_reply(json_form.to_json(self._server.resolve(target.name, target.version).config))

    def statistics(self, request: HttpRequest, target: Target) -> HttpReply:
        models = self._server.statistics(target.name, target.version)
        return json_reply({"model_stats": [_statistics(model) for model in models]})

    async def _check_ready(self) -> HttpReply:
        return self._health(await self._server.check_ready())

    async def _check_model(self, model: ServedModel) -> HttpReply:
        return _model_health(await model.check_ready())

    def _health(self, is_well: bool) -> HttpReply:
        if self._server.exiting:
            raise Unavailable("Server exiting")
        return HttpReply(200 if is_well else 400)


def _model_health(is_ready: bool) -> HttpReply:
    if not is_ready:
        raise InvalidArgument("Model version not ready")
    return HttpReply(200)


def _tensors(model: ServedModel, specs: Mapping[str, Spec]) -> list[dict[str, Any]]:
    return [
        {"name": spec.name, "datatype": spec.datatype.name, "shape": list(model.wire_shape(spec))}
        for spec in specs.values()
    ]


def _statistics(model: ServedModel) -> dict[str, Any]:
    numbers = model.snapshot()
    executions = numbers.executions
    return {
        "name": model.name,
        "version": str(model.version),
        "last_inference": executions.last_inference_ms,
        "inference_count": executions.inference_count,
        "execution_count": executions.execution_count,
        "inference_stats": {
            "success": _duration(numbers.success),
            "fail": _duration(numbers.fail),
            "queue": _duration(executions.queue),
            "compute_input": _duration(executions.compute_input),
            "compute_infer": _duration(executions.compute_infer),
            "compute_output": _duration(executions.compute_output),
            "cache_hit": _duration(numbers.cache_hit),
            "cache_miss": _duration(numbers.cache_miss),
        },
        "response_stats": {},
        "batch_stats": [
            {
                "batch_size": size,
                "compute_input": _duration(batch.compute_input),
                "compute_infer": _duration(batch.compute_infer),
                "compute_output": _duration(batch.compute_output),
            }
            for size, batch in sorted(executions.batches.items())
        ],
        "memory_usage": [],
    }


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
