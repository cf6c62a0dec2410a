"""`Services` in a child: everything is asked of the server."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar

from headrace.backends.services import LogLevel, Services
from headrace.errors import Code, HeadraceError
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.telemetry.kinds import MetricKind, MetricOperation, check_update
from headrace.workers.process.direct import DirectCalls
from headrace.workers.process.wire import notes
from headrace.workers.process.wire.answers import Reply
from headrace.workers.process.wire.frames import Kind, integers_frame
from headrace.workers.process.wire.updates import update_frame


class RemoteServices(Services):
    """``ask`` sends a request under a number of ours; ``send`` writes a frame on the side line.

    ``tell`` writes one on the line of the answers: what a model says of its metrics is heard in the
    order in which it says it, and before what it answers afterwards.
    """

    shares_memory: ClassVar[bool] = False

    def __init__(
        self,
        ask: Callable[[int, InferRequest, Callable[[Reply], None]], None],
        send: Callable[[bytes], None],
        tell: Callable[[bytes], None],
        direct: DirectCalls,
    ) -> None:
        self._ask, self._send, self._tell, self._direct = ask, send, tell, direct
        self._numbers = itertools.count(1)
        self._asked: dict[int, InferRequest] = {}
        self._calls: dict[InferRequest, int] = {}
        self._results: dict[int, Future[Any]] = {}
        #: Of families and metrics, by handle.
        self._kinds: dict[int, MetricKind] = {}

    def infer(self, request: InferRequest) -> None:
        call = next(self._numbers)
        self._asked[call] = request
        self._calls[request] = call
        self._ask(call, request, self.replied)

    def ask(self, request: InferRequest) -> Answer:
        if not self._direct.take_turn(request):
            return super().ask(request)
        return self._direct.ask(next(self._numbers), request)

    def cancel(self, request: InferRequest) -> None:
        self._mention(Kind.CANCEL, request)

    def stop(self, request: InferRequest) -> None:
        self._mention(Kind.ENOUGH, request)

    def read(self, request: InferRequest) -> None:
        self._mention(Kind.READ, request)

    def replied(self, reply: Reply) -> None:
        """An answer to a request of ours has come."""
        request = self._asked.get(reply.call)
        if request is None:
            return
        if reply.final:
            self._forget(reply.call)
        request.respond(reply.answer, reply.final)

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
        check_update(self._kinds[metric], operation, value)  # here, because nobody waits for an answer
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
        number = next(self._numbers)
        future: Future[Any] = Future()
        self._results[number] = future
        send(notes.json_frame(Kind.CALL, {"id": number, "method": method, "arguments": arguments}))
        return future.result()

    def _mention(self, kind: Kind, request: InferRequest) -> None:
        call = self._calls.get(request)
        if call is not None:
            self._send(integers_frame(kind, [call]))

    def _forget(self, call: int) -> None:
        request = self._asked.pop(call, None)
        if request is not None:
            self._calls.pop(request, None)


def _note(method: str, *arguments: object) -> bytes:
    return notes.json_frame(Kind.NOTE, {"method": method, "arguments": arguments})
