"""A server in the process of a replica. Ray calls it; it does not import Ray."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace import InferRequest, InferResponse, Server, ServerOptions, Unavailable, create_app

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
Arrays: TypeAlias = dict[str, npt.NDArray[Any]]

_MODELS = "/v2/models/"


class Replica:
    """A server with the methods that Ray calls. All run on the event loop of `start`."""

    def __init__(self, options: ServerOptions) -> None:
        self.server = Server(options)

    async def start(self) -> None:
        """Load the models. Raises `HeadraceError` if one fails."""
        await self.server.start()

    async def stop(self) -> None:
        """Answer the requests in flight, and unload the models."""
        await self.server.stop()

    async def use(self, model: str) -> None:
        """Called before each request for ``model``. A replica with multiplexed models loads it."""

    # ------------------------------------------------------------------ what handles call

    async def infer(self, model: str, inputs: Mapping[str, npt.ArrayLike], **settings: Any) -> Arrays:
        """Return the outputs of ``model`` by name. BYTES are arrays of ``bytes`` objects.

        ``settings`` and errors are those of `headrace.Server.infer_async`.
        """
        await self.use(model)
        return _arrays(await self.server.infer_async(model, inputs, **settings))

    async def stream(self, model: str, inputs: Mapping[str, npt.ArrayLike], version: str = "") -> AsyncIterator[Arrays]:
        """Yield the outputs of each response of ``model``, which may be decoupled. Raises `HeadraceError`."""
        await self.use(model)
        arrays: Any = {name: np.asarray(value) for name, value in inputs.items()}
        async for response in self.server.engine.responses(InferRequest(model, arrays, (), "", version)):
            yield _arrays(response)

    # ------------------------------------------------------------------ what Ray calls

    def app(self) -> App:
        """Return the ASGI application: the paths of the protocol, below the route prefix of the application."""
        answer = create_app(self.server.engine)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "lifespan":
                scope = _without_prefix(scope)
                if model := _model_of(scope["path"]):
                    await self.use(model)
            await answer(scope, receive, send)

        return app

    async def check_health(self) -> None:
        """Raise `Unavailable` if the server is not ready. Ray replaces the replica if that lasts."""
        if not await self.server.check_ready():
            raise Unavailable(self.server.engine.why_not_alive() or "the server is not ready")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the requests that wait in the queues of all models, for an autoscaling policy of the user's."""
        return {"headrace_pending": float(sum(model.snapshot().pending for model in self.server.served()))}


def _without_prefix(scope: Scope) -> Scope:
    prefix = scope.get("root_path", "").rstrip("/")
    if not prefix or not scope["path"].startswith(f"{prefix}/"):
        return scope
    raw = scope.get("raw_path") or scope["path"].encode()
    if raw.startswith(f"{prefix}/".encode()):
        raw = raw[len(prefix.encode()) :]
    return {**scope, "path": scope["path"][len(prefix) :], "raw_path": raw}


def _model_of(path: str) -> str:
    """Return the model in ``path``; empty if it is about none."""
    name = path.removeprefix(_MODELS).partition("/")[0] if path.startswith(_MODELS) else ""
    return "" if name == "stats" else name


def _arrays(response: InferResponse) -> Arrays:
    return {name: np.asarray(value) for name, value in response.outputs.items()}
