"""`Services` in a child: everything is asked of the server."""

from __future__ import annotations

import base64
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from struct import Struct
from typing import Any, ClassVar, Final

from headrace.backends.services import LOG_LEVELS, LogLevel, Services
from headrace.errors import Code, HeadraceError
from headrace.ipc.channel import FrameSender
from headrace.ipc.framing import HEADER_BYTES, Frame, Kind, ProtocolError, frame
from headrace.ipc.json_parts import json_frame
from headrace.ipc.peer_requests import DirectCalls, OutgoingRequests
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.series import MetricKind, MetricOperation, check_metric_update
from headrace.workers.process.handshake import ChildKind

_UPDATE = Struct("<Qd")
_OPERATIONS: Final[tuple[MetricOperation, ...]] = ("increment", "set", "observe")
_NUMBERS: Final = {operation: number for number, operation in enumerate(_OPERATIONS)}


def update_frame(metric: int, operation: MetricOperation, value: float) -> bytes:
    """A message that changes the metric of this handle: small, frequent, and without an answer."""
    return frame(ChildKind.UPDATE, _NUMBERS[operation], _UPDATE.pack(metric, value))


def read_update(message: Frame) -> tuple[int, MetricOperation, float]:
    """The handle, the operation and the value of an `update_frame`. Raises `ProtocolError`."""
    if len(message.body) < HEADER_BYTES + _UPDATE.size or message.number >= len(_OPERATIONS):
        raise ProtocolError(f"UPDATE: {len(message.body)} bytes, operation {message.number}")
    metric, value = _UPDATE.unpack_from(message.body, HEADER_BYTES)
    return metric, _OPERATIONS[message.number], value


class RemoteServices(Services):
    """``requests`` are those to other models, which ``sender`` sends, or ``direct``, whose asker reads the
    answer itself; ``send`` writes a frame on the side channel.

    ``tell`` writes one on the channel of the answers: what a model says of its metrics is heard in the
    order in which it says it, and before what it answers afterwards.
    """

    shares_memory: ClassVar[bool] = False

    def __init__(
        self,
        requests: OutgoingRequests,
        sender: FrameSender,
        direct: DirectCalls,
        send: Callable[[bytes], None],
        tell: Callable[[bytes], None],
    ) -> None:
        self._requests, self._sender, self._direct = requests, sender, direct
        self._send, self._tell = send, tell
        self._calls = itertools.count(1)
        self._results: dict[int, Future[Any]] = {}
        #: Of families and metrics, by handle.
        self._kinds: dict[int, MetricKind] = {}

    def infer(self, ticket: Ticket) -> None:
        requests = self._requests
        ((call, _),) = numbered = requests.numbered((ticket,))
        requests.enter(numbered)
        self._sender.ask(call, ticket.request, requests.take)

    def ask(self, request: InferRequest) -> Answer:
        if not self._direct.take_turn(request):
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
        handle = int(self._call(self._tell, "metric_family", name, description, kind))
        self._kinds[handle] = kind
        return handle

    def metric(self, family: int, labels: Mapping[str, str], buckets: Sequence[float] | None) -> int:
        bounds = None if buckets is None else list(buckets)
        handle = int(self._call(self._tell, "metric", family, dict(labels), bounds))
        self._kinds[handle] = self._kinds[family]
        return handle

    def update_metric(self, metric: int, operation: MetricOperation, value: float) -> None:
        check_metric_update(self._kinds[metric], operation, value)  # here, because nobody waits for an answer
        self._tell(update_frame(metric, operation, value))

    def metric_value(self, metric: int) -> float:
        return float(self._call(self._tell, "metric_value", metric))

    def release(self, handle: int) -> None:
        self._kinds.pop(handle, None)
        self._tell(_note("release", handle))

    def resolved(self, result: dict[str, Any]) -> None:
        """The server has answered a call."""
        future = self._results.pop(result["id"], None)
        if future is None:
            return
        if "code" in result:
            future.set_exception(HeadraceError(result["message"], Code(result["code"])))
        else:
            future.set_result(result["value"])

    def _call(self, send: Callable[[bytes], None], method: str, *arguments: object) -> Any:
        """What the server answers. Raises `HeadraceError`."""
        number = next(self._calls)
        future: Future[Any] = Future()
        self._results[number] = future
        send(json_frame(Kind.CALL, {"id": number, "method": method, "arguments": arguments}))
        return future.result()


def _note(method: str, *arguments: object) -> bytes:
    return json_frame(Kind.NOTE, {"method": method, "arguments": arguments})


def forward_log(services: Services, level: int) -> None:
    """Send what this process logs at ``level`` or above to the server's log."""
    logger = logging.getLogger("headrace")
    logger.setLevel(level)
    logger.addHandler(_Forwarder(services))
    logger.propagate = False


class _Forwarder(logging.Handler):
    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services

    def emit(self, record: logging.LogRecord) -> None:
        level: LogLevel = next((name for name, floor in LOG_LEVELS.items() if record.levelno >= floor), "verbose")
        self._services.log(level, self.format(record), record.pathname, record.lineno)
