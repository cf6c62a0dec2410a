"""A stand-in for the server: real signatures and options, and a model that gives back its inputs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest

from penstock.config.model_config_pb2 import DataType, ModelConfig
from penstock.config.options import ServerOptions
from penstock.errors import NotFound
from penstock.frontends.http.message import HttpReply, HttpRequest
from penstock.frontends.http.routes import Routes
from penstock.messages import dtypes
from penstock.messages.request import InferRequest
from penstock.messages.response import InferResponse
from penstock.messages.spec import Spec
from penstock.models.signature import Signature
from penstock.telemetry.statistics import ModelStatistics, Snapshot

Dims = Mapping[str, tuple[str, tuple[int, ...]]]


class EchoModel:
    """Gives back each input under its own name; with ``holds`` set, keeps requests instead."""

    def __init__(self, inputs: Dims, max_batch_size: int = 0) -> None:
        self.config = ModelConfig(name="echo", platform="stub", max_batch_size=max_batch_size)
        for name, (datatype, dims) in inputs.items():
            for io in (self.config.input.add(), self.config.output.add()):
                io.name = name
                io.data_type = DataType.Value(dtypes.BY_NAME[datatype].config_name)
                io.dims.extend(dims)
        self.name, self.version, self.platform = "echo", 1, "stub"
        self.max_batch_size, self.decoupled, self.ready, self.has_checks = max_batch_size, False, True, False
        self.labels: dict[str, list[str]] = {}
        self.signature = Signature("echo", self.config)
        self.inputs, self.outputs = self.signature.inputs, self.signature.outputs
        self.requests: list[InferRequest] = []
        self.holds = False

    def wire_shape(self, spec: Spec) -> tuple[int, ...]:
        return self.signature.wire_shape(spec)

    def snapshot(self) -> Snapshot:
        return ModelStatistics().snapshot()

    def submit(self, request: InferRequest) -> None:
        self.signature.check(request)
        self.requests.append(request)
        if not self.holds:
            self.answer(request)

    def answer(self, request: InferRequest) -> None:
        wanted = request.outputs or self.signature.outputs
        outputs: dict[str, Any] = {name: request.inputs[name] for name in self.inputs if name in wanted}
        request.respond(InferResponse(outputs, {}, "echo", "1", request.id), True)


@dataclass
class StubServer:
    model: EchoModel
    options: ServerOptions = field(default_factory=ServerOptions)
    live: bool = True
    ready: bool = True
    has_checks: bool = False
    exiting: bool = False

    def resolve(self, name: str, version: str = "") -> EchoModel:
        if name != "echo":
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return self.model

    def ready_versions(self, name: str) -> list[int]:
        return [1]

    def served(self, name: str | None, version: str) -> list[EchoModel]:
        return [self.model]


class Caller:
    """Sends requests straight to the routes, without a host."""

    def __init__(self, model: EchoModel, **options: Any) -> None:
        self.model = model
        self.server = StubServer(model, ServerOptions(**options))
        self.routes = Routes(self.server)  # type: ignore[arg-type]

    def send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[HttpReply, bytes]:
        """The reply, and its body in one piece."""
        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        folded = {name.lower(): value for name, value in raw}
        request = HttpRequest(method, path, folded, memoryview(body), raw)
        replies: list[HttpReply] = []

        async def dispatch() -> None:
            self.routes.dispatch(request, replies.append)
            while not replies:
                await asyncio.sleep(0)

        if path.startswith("/v2/repository"):  # whose replies are not there at once
            asyncio.run(asyncio.wait_for(dispatch(), 10))
        else:
            self.routes.dispatch(request, replies.append)
        (reply,) = replies
        return reply, b"".join(reply.parts)

    def infer(
        self, body: object, tensors: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[HttpReply, bytes]:
        """An infer request of ``body`` (bytes, or what becomes JSON) and binary ``tensors``."""
        text = body if isinstance(body, bytes) else orjson.dumps(body)
        length = {"Inference-Header-Content-Length": str(len(text))} if tensors else {}
        return self.send("POST", "/v2/models/echo/infer", text + tensors, {**length, **(headers or {})})


@pytest.fixture(scope="session")
def make_caller() -> Callable[..., Caller]:
    """Makes a `Caller` for an echo model: ``make_caller({"X": ("FP32", (-1,))}, max_batch_size=8)``."""

    def make(inputs: Dims, max_batch_size: int = 0, **options: Any) -> Caller:
        return Caller(EchoModel(inputs, max_batch_size), **options)

    return make
