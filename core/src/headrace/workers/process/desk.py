"""The server's end of `RemoteServices`: what a child asks for is asked of the server's services.

Event loop only, but for the calls that block, which run on a thread.
"""

from __future__ import annotations

import asyncio
import base64
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from headrace.backends.services import Services
from headrace.errors import Code, HeadraceError, summary
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.telemetry.kinds import MetricOperation
from headrace.telemetry.pacing import paced
from headrace.workers.apart import apart
from headrace.workers.process.wire import notes
from headrace.workers.process.wire.answers import reply_of, unsendable_reply
from headrace.workers.process.wire.codec import Decoder, Encoder
from headrace.workers.process.wire.failure import WireError
from headrace.workers.process.wire.frames import Frame, Kind, read_integers
from headrace.workers.process.wire.updates import read_update

log = paced(__name__)

#: Any thread: sends the reply to a call. False if the event loop has to.
AtOnce: TypeAlias = Callable[[int, InferResponse], bool]

#: What a child may have going at the same time; a model that asks for more has lost count.
_MOST_REQUESTS = 65536

#: Calls that wait for more than a lock.
_BLOCKING = frozenset(("load_model", "unload_model", "is_model_ready"))


class LoopServices(Services):
    """Services that live where the desk does."""

    @abstractmethod
    def submit(self, request: InferRequest) -> None:
        """`infer` on the event loop, at once; a refusal is an answer before this returns."""


class Desk:
    """Serves one child. ``model`` is the name of its model."""

    def __init__(self, services: LoopServices, model: str) -> None:
        self._services, self._model = services, model
        self._asked: dict[int, InferRequest] = {}
        self._handles: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = True

    def open(
        self, encoder: Encoder, decoder: Decoder, send: Callable[[bytes], None], running: Mapping[int, InferRequest]
    ) -> None:
        """Begin to serve; ``running`` are the requests that the child executes, by call."""
        self._encoder, self._decoder, self._send, self._running = encoder, decoder, send, running
        self._is_closed = False

    def close(self) -> None:
        """The child is gone: so are its requests, and its metrics."""
        self._is_closed = True
        for request in self._asked.values():
            self._services.cancel(request)
        self._asked.clear()
        for handle in self._handles:
            self._services.release(handle)
        self._handles.clear()

    def hear(self, message: Frame, send: Callable[[bytes], None], at_once: AtOnce | None = None) -> None:
        """Serve one message; replies to requests go to ``send``, unless ``at_once`` has taken them before.

        Raises `WireError` if no child would send it.
        """
        kind = message.kind
        if kind is Kind.INFER:
            for request in self._decoder.requests(message, partial(self._request, send, at_once)):
                self._services.submit(request)
        elif kind is Kind.CANCEL:
            for request in self._mentioned(message):
                self._services.cancel(request)
        elif kind is Kind.ENOUGH:
            for request in self._mentioned(message):
                request.stop()
        elif kind is Kind.READ:
            for request in self._mentioned(message):
                request.read()
        elif kind is Kind.NOTE:
            self._note(notes.read_json(message))
        elif kind is Kind.UPDATE:
            self._update(*read_update(message))
        elif kind is Kind.CALL:
            task = asyncio.ensure_future(self._call(notes.read_json(message)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            raise WireError(f"a child sends no {kind.name}")

    # ------------------------------------------------------------------ other models

    def _request(
        self,
        send: Callable[[bytes], None],
        at_once: AtOnce | None,
        call: int,
        caller: int,
        inputs: dict[str, Any],
    ) -> InferRequest:
        if call in self._asked or len(self._asked) >= _MOST_REQUESTS:
            raise WireError(f"request {call} is one too many")
        has_replied = False

        def reply(answer: Answer, final: bool) -> None:
            if final:
                self._asked.pop(call, None)
            if not has_replied and not self._is_closed:
                self._reply(send, call, answer, final)

        self._asked[call] = request = InferRequest("", inputs, reply, caller=self._running.get(caller))
        if at_once is not None:

            def reply_at_once(response: InferResponse) -> None:
                nonlocal has_replied
                has_replied = at_once(call, response)

            request.respond_at_once = reply_at_once
        return request

    def _mentioned(self, message: Frame) -> list[InferRequest]:
        found = map(self._asked.get, read_integers(message))
        return [request for request in found if request is not None]

    def _reply(self, send: Callable[[bytes], None], call: int, answer: Answer, final: bool) -> None:
        reply = reply_of(call, answer, final)
        try:
            message = self._encoder.answers(Kind.REPLIES, [reply])
        except ValueError as error:
            message = self._encoder.answers(Kind.REPLIES, [unsendable_reply(reply, error)])
        send(message)

    # ------------------------------------------------------------------ everything else

    def _note(self, note: Mapping[str, Any]) -> None:
        match note:
            case {"method": "log", "arguments": [str(level), str(text), str(file), int(line)]}:
                self._services.log(level, text, file, line)  # type: ignore[arg-type]
            case {"method": "release", "arguments": [int(handle)]} if handle in self._handles:
                self._handles.discard(handle)
                self._services.release(handle)
            case _:
                raise WireError(f"a note {note}")

    def _update(self, metric: int, operation: MetricOperation, value: float) -> None:
        """Change a metric; the child has checked what there is to check."""
        if metric not in self._handles:
            raise WireError(f"an update of metric {metric}, which the child does not hold")
        self._services.update_metric(metric, operation, value)

    async def _call(self, call: Mapping[str, Any]) -> None:
        result: dict[str, Any] = {"id": call.get("id")}
        try:
            answer = partial(self._answer, call)
            is_slow = call.get("method") in _BLOCKING
            result["value"] = await apart(answer, "headrace-desk") if is_slow else answer()
        except HeadraceError as error:
            result.update(code=error.code.value, message=error.message)
        except Exception as error:
            log.exception("a call of model '%s' failed", self._model)
            result.update(code=Code.INTERNAL.value, message=summary(error))
        if not self._is_closed:
            self._send(notes.json_frame(Kind.RESULT, result))

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
