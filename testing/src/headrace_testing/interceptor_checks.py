"""Checks of an interceptor: what it admits and refuses, and that an ended operation no longer counts."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from inspect import isawaitable
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import (
    Answer,
    AnyOperation,
    BatchTimes,
    Caller,
    Cancelled,
    Code,
    ExtensionOperation,
    FinishedInference,
    HeadraceError,
    InferRequest,
    InferResponse,
    Interceptor,
    Operation,
    Outcome,
    PermissionDenied,
    ResourceExhausted,
    Server,
    ServerOptions,
    Unauthenticated,
    Watch,
)
from headrace_testing.driving import assert_installed, part_of
from headrace_testing.example import NAME, write_model
from headrace_testing.plugin import NOT_RUN
from headrace_testing.serving import serve

_CONFIG = f"""name: "{NAME}" backend: "identity" max_batch_size: 8
    input {{ name: "x" data_type: TYPE_FP32 dims: 1 }} output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}"""
_JSON = b'{"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}'
_TRANSPORTS = ("http", "grpc", "metrics", "lines", "program", "model")
_OPERATIONS: tuple[AnyOperation, ...] = (*Operation, ExtensionOperation("chat"))
#: The path of a model that does not exist.
_WRONG = "/v2/models/no_such_model/infer"
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_TIMES = BatchTimes(30, 40, 50, 60)
#: An executed inference, one that was not executed, and a refused one.
_RECORDS = (
    FinishedInference(10, "http", "127.0.0.1", "", "", NAME, 1, "id", 4, None, 4, 70, 20, _TIMES),
    FinishedInference(10, "http", "", "", "", NAME, 1, "", 0, None, 0, 70, 20, None),
    FinishedInference(10, "grpc", "127.0.0.1", "me", "?", NAME, 1, "\n", 4, Code.UNAVAILABLE, 0, 20, 0, None),
)
#: The HTTP status and the name of the gRPC code.
_STATUS = {
    Unauthenticated: (401, "UNAUTHENTICATED"),
    PermissionDenied: (403, "PERMISSION_DENIED"),
    ResourceExhausted: (429, "RESOURCE_EXHAUSTED"),
}


@dataclass(frozen=True)
class RefusedOperation:
    """An operation that the interceptor must refuse with an ``error`` of this class.

    ``after`` is the number of admitted inferences of the same caller that are still in flight.
    """

    error: type[HeadraceError]
    headers: Mapping[str, str] = field(default_factory=dict)
    operation: AnyOperation = Operation.INFER
    after: int = 0


class InterceptorChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``interceptor``, its name.

    It may override `options`, which enable the interceptor, `headers` of an admitted caller, and `refusals`.
    """

    plugin: ClassVar[str]
    interceptor: ClassVar[str]
    #: The number of consecutive inferences that an admitted caller may request.
    repeats: ClassVar[int] = 50
    #: The maximum time that `admit` and a recorder may block the event loop.
    blocking_s: ClassVar[float] = 0.1
    #: The maximum time that `admit` may wait.
    waits_s: ClassVar[float] = 10.0

    def options(self) -> Mapping[str, Any]:
        """Return the fields of `ServerOptions` that enable the interceptor."""
        return {}

    def headers(self) -> Mapping[str, str]:
        """Return the headers of an admitted caller, with names in lower case."""
        return {}

    def refusals(self) -> Sequence[RefusedOperation]:
        """Return operations that must be refused."""
        return ()

    def make(self) -> Interceptor:
        """Return the interceptor, created as a server does."""
        kind: type[Interceptor] = part_of(self.plugin, "interceptor", self.interceptor)
        return kind(ServerOptions(**self.options()))

    # ------------------------------------------------------------------ admission

    def test_its_options_enable_it(self) -> None:
        assert self.make().enabled, f"'{self.interceptor}' does nothing with the options of the test"

    def test_an_admitted_caller_stays_admitted(self) -> None:
        """After an operation has ended, in whatever way, it no longer counts."""

        async def check() -> None:
            interceptor, error = self.make(), Cancelled("the caller has disconnected")
            for number in range(self.repeats):
                caller = _caller(self.headers())
                refusal = await self._refusal(interceptor, caller)
                assert refusal is None, f"inference {number + 1} is refused after {number} have ended: {refusal}"
                if number % 3 == 0:
                    caller.answered(InferResponse({}), final=True)
                caller.end(error if number % 3 == 1 else None)
                self._require_no_watch_error()

        asyncio.run(check())

    def test_calls_of_models_for_an_admitted_caller_are_admitted(self) -> None:
        async def check() -> None:
            interceptor, caller = self.make(), _caller(self.headers())
            assert await self._refusal(interceptor, caller) is None
            for _ in range(self.repeats):
                inner = Caller("model", parent=caller)
                refusal = await self._refusal(interceptor, inner)
                assert refusal is None, f"a call of a model for an admitted caller is refused: {refusal}"
                inner.end()
                self._require_no_watch_error()

        asyncio.run(check())

    @pytest.mark.parametrize("transport", _TRANSPORTS)
    def test_every_operation_has_a_verdict(self, transport: str) -> None:
        """With or without a model, headers and an address, `admit` raises only errors of Headrace."""

        async def check() -> None:
            for operation, model in product(_OPERATIONS, ("", NAME)):
                for caller in (Caller(transport), _caller(self.headers(), transport)):
                    interceptor = self.make()
                    refusal = await self._refusal(interceptor, caller, operation, model)
                    if refusal is not None:
                        interceptor.refused(caller, refusal)  # as core does for every interceptor
                    caller.end(refusal)
                    self._require_no_watch_error()
                    assert refusal is None or refusal.message, f"'{operation}' is refused without a message"

        asyncio.run(check())

    def test_allowed_callers_agrees_with_the_refusals(self) -> None:
        """An operation that ``allowed_callers`` declares open is not refused to a caller without headers."""

        async def check() -> None:
            for transport, operation in product(("http", "grpc", "metrics"), _OPERATIONS):
                interceptor, caller = self.make(), Caller(transport, "192.0.2.1")
                who = interceptor.allowed_callers(operation, transport)
                assert who is None or isinstance(who, str), f"allowed_callers returns {who!r}, which is no text"
                refusal = await self._refusal(interceptor, caller, operation)
                caller.end(refusal)
                needs_credentials = isinstance(refusal, Unauthenticated | PermissionDenied)
                assert not needs_credentials or who != "", (
                    f"allowed_callers declares '{operation}' open over {transport}, but a caller without "
                    f"headers is refused: {refusal}"
                )

        asyncio.run(check())

    def test_it_refuses_the_declared_operations(self) -> None:
        async def check(expected: RefusedOperation) -> None:
            interceptor = self.make()
            for number in range(expected.after):
                refusal = await self._refusal(interceptor, _caller(expected.headers))
                assert refusal is None, f"inference {number + 1} of {expected.after} is refused: {refusal}"
            found = await self._refusal(interceptor, _caller(expected.headers), expected.operation)
            assert type(found) is expected.error, f"{expected}: {found!r}"

        for expected in self._expected_refusals():
            asyncio.run(check(expected))

    # ------------------------------------------------------------------ the event loop

    def test_it_does_not_block_the_event_loop(self) -> None:
        async def check() -> list[float]:
            interceptor, times = self.make(), []
            for operation in _OPERATIONS:
                start = perf_counter()
                with suppress(HeadraceError):
                    _discard(interceptor.admit(_caller(self.headers()), operation, NAME))
                times.append(perf_counter() - start)
            return times

        quickest = min(asyncio.run(check()))  # the minimum: the machine may be busy
        assert quickest < self.blocking_s, f"each call of admit blocks the event loop for {quickest:.3f} s"

    def test_a_caller_that_disconnects_while_it_waits_does_not_count(self) -> None:
        async def check() -> None:
            interceptor = self.make()
            for _ in range(self.repeats):
                verdict = interceptor.admit(_caller(self.headers()), Operation.INFER, NAME)
                if not isawaitable(verdict):
                    pytest.skip(f"{NOT_RUN}'{self.interceptor}' does not wait at an inference")
                waiting = asyncio.ensure_future(verdict)
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting], timeout=self.waits_s)
                assert waiting.done(), "it still waits for a caller that has disconnected"
            refusal = await self._refusal(interceptor, _caller(self.headers()))
            assert refusal is None, f"callers that disconnected while they waited still count: {refusal}"

        asyncio.run(check())

    def test_its_recorder_accepts_every_record_at_once(self) -> None:
        """It does not raise, because no caller would see the error, and does not block."""

        async def add() -> list[float]:
            recorder, times = self.make().recorder, []
            if recorder is None:
                pytest.skip(f"{NOT_RUN}'{self.interceptor}' has no recorder")
            for record in _RECORDS * 10:
                start = perf_counter()
                recorder.add(tuple(record))
                times.append(perf_counter() - start)
            return times

        quickest = min(asyncio.run(add()))
        assert quickest < self.blocking_s, f"each record blocks the event loop for {quickest:.3f} s"

    def test_it_permits_only_admitted_callers(self) -> None:
        """A permit skips `admit`, so it may stand only for callers that `admit` would accept."""

        async def check() -> None:
            interceptor, caller = self.make(), _caller(self.headers())
            if interceptor.permits is None:
                pytest.skip(f"{NOT_RUN}'{self.interceptor}' permits no inference")
            assert await self._refusal(interceptor, caller) is None
            refused = [each.headers for each in self.refusals() if each.operation is Operation.INFER and not each.after]
            for headers in refused:
                await self._refusal(interceptor, _caller(headers))
            for form in (str, str.encode):
                values = [form(each.get("authorization", "")) for each in (self.headers(), *refused)]
                found = interceptor.permits.get(values[0], {}).get(NAME, caller.principal)
                assert found == caller.principal, f"it permits an inference of '{caller.principal}' as '{found}'"
                for wrong in values[1:]:
                    assert wrong not in interceptor.permits, (
                        f"it permits {dict(interceptor.permits[wrong])} for a caller that it refuses"
                    )

        asyncio.run(check())

    def test_its_meters_agree_with_admit(self, tmp_path: Path) -> None:
        """An inference that a meter begins counts, and a meter begins none that `admit` would refuse."""
        if self.make().meters is None:
            pytest.skip(f"{NOT_RUN}'{self.interceptor}' meters no inference")
        request = InferRequest(NAME, {"x": np.ones((1, 1), np.float32)})
        with _serving(tmp_path, {}) as server:
            view = server.engine.resolve(NAME)

        async def check(expected: RefusedOperation) -> None:
            interceptor, caller = self.make(), _caller(expected.headers)
            assert await self._refusal(interceptor, caller) is None
            interceptor.intercept(request, view, caller)
            meter = (interceptor.meters or {}).get((caller.principal or (caller.peer,), NAME))
            if meter is None or not meter.begin(view, 1):
                return
            meter.take_back(1)
            count = 1
            while count < expected.after and meter.begin(view, 1):
                count += 1
            for number in range(count, expected.after):
                refusal = await self._refusal(interceptor, _caller(expected.headers))
                assert refusal is None, f"inference {number + 1} of {expected.after} is refused: {refusal}"
            assert not meter.begin(view, 1), f"its meter begins inference {expected.after + 1}, which must be refused"
            found = await self._refusal(interceptor, _caller(expected.headers))
            assert type(found) is expected.error, f"after {count} by its meter: {found!r}"

        for expected in self._expected_refusals():
            if expected.operation is Operation.INFER and expected.after:
                asyncio.run(check(expected))

    # ------------------------------------------------------------------ requests

    def test_intercept_does_not_change_the_request_or_its_model(self, tmp_path: Path) -> None:
        inputs, parameters = {"x": np.ones((1, 1), np.float32)}, {"of": "the caller"}
        request = InferRequest(NAME, inputs, parameters=parameters)
        with _serving(tmp_path, {}) as server:
            view = server.engine.resolve(NAME)

        async def check() -> InferRequest | None:
            interceptor, caller = self.make(), _caller(self.headers())
            assert await self._refusal(interceptor, caller) is None
            return interceptor.intercept(request, view, caller)

        found = asyncio.run(check())
        assert found is None or (isinstance(found, InferRequest) and found.model_name == NAME), repr(found)
        assert (list(inputs), parameters) == (["x"], {"of": "the caller"}), "it changes the request"

    # ------------------------------------------------------------------ in a server

    def test_a_server_finds_it_and_serves_the_admitted(self, tmp_path: Path) -> None:
        with _serving(tmp_path, self.options(), listen=True) as server:
            assert_installed("interceptor", self.interceptor, self.plugin, server.plugins.interceptors.names())
            assert _post(server, f"/v2/models/{NAME}/infer", _JSON, self.headers()) == 200
            assert _call(server, _request(NAME), self.headers()) == "OK"

    def test_a_server_refuses_before_it_reads_the_body(self, tmp_path: Path) -> None:
        """The model is unknown and the body is malformed, but the caller is checked first."""
        expected = [each for each in self._expected_refusals() if each.operation is Operation.INFER and not each.after]
        if not expected:
            pytest.skip(f"{NOT_RUN}'{self.interceptor}' refuses no inference by its headers alone")
        with _serving(tmp_path, self.options(), listen=True) as server:
            for each in expected:
                status, code = _STATUS[each.error]
                assert _post(server, _WRONG, b"{", each.headers) == status
                assert _call(server, _request("no_such_model"), each.headers) == code

    async def _refusal(
        self, interceptor: Interceptor, caller: Caller, operation: AnyOperation = Operation.INFER, model: str = NAME
    ) -> HeadraceError | None:
        """Return the error that refuses the operation, or None. Then its `Watch` is added to ``caller``."""
        caller.operation, caller.model = operation, model
        try:
            verdict: Any = interceptor.admit(caller, operation, model)
            if isawaitable(verdict):
                verdict = await asyncio.wait_for(verdict, self.waits_s)
        except HeadraceError as error:
            return error
        assert verdict is None or isinstance(verdict, Watch), f"admit returned {verdict!r}, neither a Watch nor None"
        if verdict is not None:
            caller.watch(_RecordingWatch(verdict, self._watch_errors()))
        return None

    def _watch_errors(self) -> list[str]:
        """Return the errors of the watches in this check."""
        found: list[str] = self.__dict__.setdefault("_raised", [])
        return found

    def _require_no_watch_error(self) -> None:
        assert not self._watch_errors(), f"the Watch raised {self._watch_errors()[0]}"

    def _expected_refusals(self) -> Sequence[RefusedOperation]:
        found = self.refusals()
        if not found:
            pytest.skip(f"{NOT_RUN}'{self.interceptor}' declares no refusals")
        return found


def _caller(headers: Mapping[str, str], transport: str = "http") -> Caller:
    return Caller(transport, "127.0.0.1", header=headers.get, headers=lambda: tuple(headers.items()))


class _RecordingWatch(Watch):
    """Forwards to a watch, and appends its errors to ``errors``: a `Caller` only logs them."""

    def __init__(self, watch: Watch, errors: list[str]) -> None:
        self._watch, self._watch_errors = watch, errors

    def answered(self, answer: Answer, final: bool) -> None:
        try:
            self._watch.answered(answer, final)
        except BaseException as error:
            self._watch_errors.append(f"{error!r} in answered")

    def ended(self, outcome: Outcome) -> None:
        try:
            self._watch.ended(outcome)
        except BaseException as error:
            self._watch_errors.append(f"{error!r} in ended")


def _discard(verdict: object) -> None:
    if isinstance(verdict, Coroutine):
        verdict.close()
    elif isinstance(verdict, asyncio.Future):
        verdict.cancel()


def _serving(repository: Path, options: Mapping[str, Any], listen: bool = False) -> AbstractContextManager[Server]:
    write_model(repository, _CONFIG)
    return serve(repository, listen, **options)


def _post(server: Server, path: str, body: bytes, headers: Mapping[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.options.http_port, timeout=60)
    try:
        connection.request("POST", path, body, dict(headers))
        return connection.getresponse().status
    finally:
        connection.close()


def _request(model: str) -> bytes:
    from tritonclient.grpc import service_pb2

    tensor = service_pb2.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=[1, 1])
    one = np.ones(1, np.float32).tobytes()
    request = service_pb2.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[one])
    encoded: bytes = request.SerializeToString()
    return encoded


def _call(server: Server, request: bytes, headers: Mapping[str, str]) -> str:
    """Return the name of the status code of one unary call."""
    import grpc

    with grpc.insecure_channel(f"127.0.0.1:{server.options.grpc_port}") as channel:
        try:
            channel.unary_unary(_INFER, bytes, bytes)(request, timeout=60, metadata=tuple(headers.items()))
        except grpc.RpcError as error:
            name: str = error.code().name
            return name
    return "OK"
