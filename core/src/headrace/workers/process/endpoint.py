"""The server's end of `RemoteServices`: what a child asks for is asked of the server's services.

Event loop only, but for the calls that block, which run on a thread.
"""

from __future__ import annotations

import asyncio
import base64
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.backends.services import Services
from headrace.errors import Code, HeadraceError, summary
from headrace.ipc.codec import Decoder, Encoder
from headrace.ipc.framing import Frame, Kind, ProtocolError
from headrace.ipc.json_parts import json_frame, read_json
from headrace.ipc.peer_requests import AtOnce, IncomingRequests
from headrace.messages.ticket import Ticket
from headrace.telemetry.pacing import paced
from headrace.telemetry.series import MetricOperation
from headrace.workers.process.handshake import ChildKind
from headrace.workers.process.remote_services import read_update
from headrace.workers.threads import apart

log = paced(__name__)

#: ModelCalls that wait for more than a lock.
_BLOCKING = frozenset(("load_model", "unload_model", "is_model_ready"))


class LoopServices(Services):
    """Services that live where the endpoint does."""

    @abstractmethod
    def submit(self, ticket: Ticket) -> None:
        """`infer` on the event loop, at once; a refusal is an answer before this returns."""


class ServiceEndpoint:
    """Serves one child. ``model`` is the name of its model."""

    def __init__(self, services: LoopServices, model: str) -> None:
        self._services, self._model = services, model
        self._requests: IncomingRequests | None = None
        self._send: Callable[[bytes], None]
        self._handles: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(
        self, encoder: Encoder, decoder: Decoder, send: Callable[[bytes], None], running: Mapping[int, Ticket]
    ) -> None:
        """Begin to serve; ``running`` are the requests that the child executes, by call."""
        self._send = send
        services = self._services
        self._requests = IncomingRequests(encoder, decoder, services.submit, services.cancel, running)

    def close(self) -> None:
        """The child is gone: so are its requests, and its metrics."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        for handle in self._handles:
            self._services.release(handle)
        self._handles.clear()

    def hear(self, message: Frame, send: Callable[[bytes], None], at_once: AtOnce | None = None) -> None:
        """Serve one message; replies to requests go to ``send``, unless ``at_once`` has taken them before.

        Raises `ProtocolError` if no child would send it.
        """
        kind = message.kind
        if self._requests is None or self._requests.hear(message, send, at_once):
            return  # none: what a child had sent before it was given up
        if kind == Kind.NOTE:
            self._note(read_json(message))
        elif kind == ChildKind.UPDATE:
            self._update(*read_update(message))
        elif kind == Kind.CALL:
            task = asyncio.ensure_future(self._call(read_json(message)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            raise ProtocolError(f"a child sends no frame of kind {kind}")

    def _note(self, note: Mapping[str, Any]) -> None:
        match note:
            case {"method": "log", "arguments": [str(level), str(text), str(file), int(line)]}:
                self._services.log(level, text, file, line)  # type: ignore[arg-type]
            case {"method": "release", "arguments": [int(handle)]} if handle in self._handles:
                self._handles.discard(handle)
                self._services.release(handle)
            case _:
                raise ProtocolError(f"a note {note}")

    def _update(self, metric: int, operation: MetricOperation, value: float) -> None:
        """Change a metric; the child has checked what there is to check."""
        if metric not in self._handles:
            raise ProtocolError(f"an update of metric {metric}, which the child does not hold")
        self._services.update_metric(metric, operation, value)

    async def _call(self, call: Mapping[str, Any]) -> None:
        result: dict[str, Any] = {"id": call.get("id")}
        try:
            answer = partial(self._answer, call)
            is_slow = call.get("method") in _BLOCKING
            result["value"] = await apart(answer, "headrace-service") if is_slow else answer()
        except HeadraceError as error:
            result.update(code=error.code.value, message=error.message)
        except Exception as error:
            log.exception("a call of model '%s' failed", self._model)
            result.update(code=Code.INTERNAL.value, message=summary(error))
        if self._requests is not None:
            self._send(json_frame(Kind.RESULT, result))

    def _answer(self, call: Mapping[str, Any]) -> Any:
        """The value of a call; on a thread if it is one of `_BLOCKING`. Raises `HeadraceError`."""
        services = self._services
        match call:
            case {"method": "load_model", "arguments": [str(name), str(config), dict(files)]}:
                services.load_model(name, config, {str(key): base64.b64decode(text) for key, text in files.items()})
            case {"method": "unload_model", "arguments": [str(name), bool(dependents)]}:
                services.unload_model(name, dependents)
            case {"method": "is_model_ready", "arguments": [str(name), str(version)]}:
                return services.is_model_ready(name, version)
            case {"method": "metric_family", "arguments": [str(name), str(description), str(kind)]}:
                return self._hold(services.metric_family(name, description, kind))  # type: ignore[arg-type]
            case {"method": "metric", "arguments": [int(family), dict(labels), buckets]} if family in self._handles:
                return self._hold(services.metric(family, labels, buckets))
            case {"method": "metric_value", "arguments": [int(metric)]} if metric in self._handles:
                return services.metric_value(metric)
            case _:
                raise HeadraceError(f"no such call: {call.get('method')}", Code.INVALID_ARGUMENT)
        return None

    def _hold(self, handle: int) -> int:
        self._handles.add(handle)
        return handle
