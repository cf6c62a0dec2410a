"""The calls of a child to its server: `RemoteServices` in the child, `ServiceEndpoint` in the server."""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from struct import Struct
from typing import Any, ClassVar, Final

from headrace.backends.services import LOG_LEVELS, LogLevel, LoopServices, Services
from headrace.errors import Code, HeadraceError, summary
from headrace.executors.threads import run_on_thread
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.log_limits import rate_limited_logger
from headrace.telemetry.series import MetricKind, MetricOperation, check_metric_update
from headrace_processes.handshake import ChildKind
from headrace_processes.ipc.channel import FrameSender
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.framing import HEADER_BYTES, Frame, Kind, ProtocolError, frame
from headrace_processes.ipc.json_parts import json_frame, read_json
from headrace_processes.ipc.peer_requests import AtOnce, FastPathCalls, IncomingRequests, OutgoingRequests

log = rate_limited_logger(__name__)
#: The loggers of Headrace in a child.
_LOGGERS = ("headrace", "headrace_engines", "headrace_processes")

#: Calls that may wait for more than a lock.
_BLOCKING = frozenset(("load_model", "unload_model", "is_model_ready"))
_UPDATE = Struct("<QdI")
#: The most times in one update. The server applies it on its event loop.
MAX_TIMES = 4096
_OPERATIONS: Final[tuple[MetricOperation, ...]] = ("increment", "set", "observe")
_NUMBERS: Final = {operation: number for number, operation in enumerate(_OPERATIONS)}


# ---------------------------------------------------------------------- in the child


class RemoteServices(Services):
    """The services of the server, from a child.

    | Argument | Use |
    |---|---|
    | ``requests`` | the requests to other models |
    | ``sender`` | sends them |
    | ``direct`` | sends one request whose calling thread reads the answer itself |
    | ``send`` | writes a frame on the side channel |
    | ``send_metric`` | writes a frame about metrics on the channel of the answers |

    So updates of metrics arrive in order, and before the answers that the model sends after them.
    """

    shares_memory: ClassVar[bool] = False

    def __init__(
        self,
        requests: OutgoingRequests,
        sender: FrameSender,
        direct: FastPathCalls,
        send: Callable[[bytes], None],
        send_metric: Callable[[bytes], None],
    ) -> None:
        self._requests, self._sender, self._direct = requests, sender, direct
        self._send, self._send_metric = send, send_metric
        self._calls = itertools.count(1)
        self._results: dict[int, Future[Any]] = {}
        #: The kinds of families and metrics, by handle.
        self._kinds: dict[int, MetricKind] = {}

    def infer(self, ticket: Ticket) -> None:
        requests = self._requests
        ((call, _),) = numbered = requests.numbered((ticket,))
        requests.enter(numbered)
        self._sender.ask(call, ticket.request, requests.answer)

    def ask(self, request: InferRequest) -> Answer:
        if not self._direct.try_acquire(request):
            return super().ask(request)
        return self._direct.ask(next(self._requests.numbers), request)

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancel()

    def stop(self, ticket: Ticket) -> None:
        ticket.stop()

    def read(self, ticket: Ticket) -> None:
        ticket.read()

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        encoded = {path: base64.b64encode(content).decode() for path, content in files.items()}
        self._call(self._send, "load_model", name, config, encoded)

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        self._call(self._send, "unload_model", name, unload_dependents)

    def is_model_ready(self, name: str, version: str) -> bool:
        return bool(self._call(self._send, "is_model_ready", name, version))

    def log(self, level: LogLevel, message: str, file: str, line: int) -> None:
        self._send(_note("log", level, message, file, line))

    def metric_family(self, name: str, description: str, kind: MetricKind) -> int:
        handle = int(self._call(self._send_metric, "metric_family", name, description, kind))
        self._kinds[handle] = kind
        return handle

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        bounds = None if buckets is None else list(buckets)
        handle = int(self._call(self._send_metric, "metric", family, dict(labels), bounds))
        self._kinds[handle] = self._kinds[family]
        return handle

    def update_metric(self, metric: int, operation: MetricOperation, value: float, times: int = 1) -> None:
        check_metric_update(self._kinds[metric], operation, value)  # checked here: the update has no reply
        for done in range(0, times, MAX_TIMES):
            self._send_metric(update_frame(metric, operation, value, min(times - done, MAX_TIMES)))

    def metric_value(self, metric: int) -> float:
        return float(self._call(self._send_metric, "metric_value", metric))

    def release(self, handle: int) -> None:
        self._kinds.pop(handle, None)
        self._send_metric(_note("release", handle))

    def resolved(self, result: dict[str, Any]) -> None:
        """Complete the call to which ``result`` belongs."""
        future = self._results.pop(result["id"], None)
        if future is None:
            return
        if "code" in result:
            future.set_exception(HeadraceError(result["message"], Code(result["code"])))
        else:
            future.set_result(result["value"])

    def _call(self, send: Callable[[bytes], None], method: str, *arguments: object) -> Any:
        """Call ``method`` of the server and return its result. Raises `HeadraceError`."""
        number = next(self._calls)
        future: Future[Any] = Future()
        self._results[number] = future
        send(json_frame(Kind.CALL, {"id": number, "method": method, "arguments": arguments}))
        return future.result()


def _note(method: str, *arguments: object) -> bytes:
    return json_frame(Kind.NOTE, {"method": method, "arguments": arguments})


def forward_log(services: Services, level: int) -> None:
    """Send the log records of this process at ``level`` or above to the server's log."""
    forwarder = _Forwarder(services)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.addHandler(forwarder)
        logger.propagate = False


class _Forwarder(logging.Handler):
    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services

    def emit(self, record: logging.LogRecord) -> None:
        level: LogLevel = next((name for name, floor in LOG_LEVELS.items() if record.levelno >= floor), "verbose")
        self._services.log(level, self.format(record), record.pathname, record.lineno)


# ---------------------------------------------------------------------- in the server


class ServiceEndpoint:
    """Executes the calls of one child. ``model`` is the name of its model."""

    def __init__(self, services: LoopServices, model: str) -> None:
        self._services, self._model = services, model
        self._requests: IncomingRequests | None = None
        self._send: Callable[[bytes], None]
        self._handles: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def open(
        self, encoder: Encoder, decoder: Decoder, send: Callable[[bytes], None], running: Mapping[int, Ticket]
    ) -> None:
        """Start to serve. ``running`` are the requests that the child executes, by call number."""
        self._send = send
        self._requests = self._incoming(encoder, decoder, running)

    def _incoming(self, encoder: Encoder, decoder: Decoder, running: Mapping[int, Ticket]) -> IncomingRequests:
        services = self._services
        return IncomingRequests(encoder, decoder, services.submit, services.cancel, running)

    def close(self) -> None:
        """Remove the calls, requests and metrics of the child: it has exited."""
        for task in self._tasks:
            task.cancel()
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        for handle in self._handles:
            self._services.release(handle)
        self._handles.clear()

    def receive(self, message: Frame, send: Callable[[bytes], None], at_once: AtOnce | None = None) -> None:
        """Handle one message. Replies to requests are written with ``send``, unless ``at_once`` has sent them.

        Raises `ProtocolError` for a message that a child may not send.
        """
        kind = message.kind
        if self._requests is None or self._requests.receive(message, send, at_once):
            return  # None: the message was sent before the child was killed
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

    def _update(self, metric: int, operation: MetricOperation, value: float, times: int) -> None:
        """Change a metric. The child has checked the value."""
        if metric not in self._handles:
            raise ProtocolError(f"an update of metric {metric}, which the child does not hold")
        self._services.update_metric(metric, operation, value, times)

    async def _call(self, call: Mapping[str, Any]) -> None:
        result: dict[str, Any] = {"id": call.get("id")}
        try:
            execute = partial(self._execute, call)
            is_slow = call.get("method") in _BLOCKING
            result["value"] = await run_on_thread(execute, "headrace-service") if is_slow else execute()
        except HeadraceError as error:
            result.update(code=error.code.value, message=error.message)
        except Exception as error:
            log.exception("a call of model '%s' failed", self._model)
            result.update(code=Code.INTERNAL.value, message=summary(error))
        if self._requests is not None:
            self._send(json_frame(Kind.RESULT, result))

    def _execute(self, call: Mapping[str, Any]) -> Any:
        """Execute a call and return its value. On a thread if the method is in `_BLOCKING`. Raises `HeadraceError`."""
        services = self._services
        match call:
            case {"method": "load_model", "arguments": [str(name), str(config), dict(files)]}:
                services.load_model(name, config, {str(key): base64.b64decode(text) for key, text in files.items()})
            case {"method": "unload_model", "arguments": [str(name), bool(dependents)]}:
                services.unload_model(name, dependents)
            case {"method": "is_model_ready", "arguments": [str(name), str(version)]}:
                return services.is_model_ready(name, version)
            case {"method": "metric_family", "arguments": [str(name), str(description), str(kind)]}:
                return self._register(services.metric_family(name, description, kind))  # type: ignore[arg-type]
            case {"method": "metric", "arguments": [int(family), dict(labels), buckets]} if family in self._handles:
                return self._register(services.metric(family, labels, buckets))
            case {"method": "metric_value", "arguments": [int(metric)]} if metric in self._handles:
                return services.metric_value(metric)
            case _:
                raise HeadraceError(f"no such call: {call.get('method')}", Code.INVALID_ARGUMENT)
        return None

    def _register(self, handle: int) -> int:
        self._handles.add(handle)
        return handle


# ---------------------------------------------------------------------- between them


def update_frame(metric: int, operation: MetricOperation, value: float, times: int = 1) -> bytes:
    """Return a message that updates the metric of this handle ``times`` times. It is small, and has no reply."""
    return frame(ChildKind.UPDATE, _NUMBERS[operation], _UPDATE.pack(metric, value, times))


def read_update(message: Frame) -> tuple[int, MetricOperation, float, int]:
    """Return the handle, the operation, the value and the times of an `update_frame`. Raises `ProtocolError`."""
    if len(message.body) < HEADER_BYTES + _UPDATE.size or message.number >= len(_OPERATIONS):
        raise ProtocolError(f"UPDATE: {len(message.body)} bytes, operation {message.number}")
    metric, value, times = _UPDATE.unpack_from(message.body, HEADER_BYTES)
    if times > MAX_TIMES:
        raise ProtocolError(f"UPDATE: {times} times, the limit is {MAX_TIMES}")
    return metric, _OPERATIONS[message.number], value, times
