"""An interceptor from outside: what it admits and refuses, and what it keeps of operations that are over."""

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
from headrace_testing.driving import part_of
from headrace_testing.example import NAME, write_model
from headrace_testing.plugin import NOT_RUN
from headrace_testing.serving import serve

_CONFIG = f"""name: "{NAME}" backend: "identity" max_batch_size: 8
    input {{ name: "x" data_type: TYPE_FP32 dims: 1 }} output {{ name: "y" data_type: TYPE_FP32 dims: 1 }}"""
_JSON = b'{"inputs": [{"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [1]}]}'
_TRANSPORTS = ("http", "grpc", "metrics", "lines", "program", "model")
_OPERATIONS: tuple[AnyOperation, ...] = (*Operation, ExtensionOperation("chat"))
#: The inference of a model that the repository does not have, with a body that is no request.
_WRONG = "/v2/models/no_such_model/infer"
_INFER = "/inference.GRPCInferenceService/ModelInfer"
_TIMES = BatchTimes(30, 40, 50, 60)
#: Of an inference that was executed, one that was not, and one that was refused.
_RECORDS = (
    FinishedInference(10, "http", "127.0.0.1", "", "", NAME, 1, "id", 4, None, 4, 70, 20, _TIMES),
    FinishedInference(10, "http", "", "", "", NAME, 1, "", 0, None, 0, 70, 20, None),
    FinishedInference(10, "grpc", "127.0.0.1", "me", "?", NAME, 1, "\n", 4, Code.UNAVAILABLE, 0, 20, 0, None),
)
#: The status over HTTP, and the name of the code over gRPC.
_STATUS = {
    Unauthenticated: (401, "UNAUTHENTICATED"),
    PermissionDenied: (403, "PERMISSION_DENIED"),
    ResourceExhausted: (429, "RESOURCE_EXHAUSTED"),
}


@dataclass(frozen=True)
class RefusedOperation:
    """An operation that the interceptor must refuse with an ``error`` of this class.

    ``after`` is the number of inferences of the same caller that are admitted before, and are not over yet.
    """

    error: type[HeadraceError]
    headers: Mapping[str, str] = field(default_factory=dict)
    operation: AnyOperation = Operation.INFER
    after: int = 0


class InterceptorChecks:
    """A subclass sets ``plugin``, the module of the entry point, and ``interceptor``, its name.

    It says how the interceptor is enabled (`options`), what an admitted caller sends (`headers`), and what must be
    refused (`refusals`). `repeats` inferences of an admitted caller, one after the other, are admitted.
    """

    plugin: ClassVar[str]
    interceptor: ClassVar[str]
    #: The number of inferences that an admitted caller may ask one after the other.
    repeats: ClassVar[int] = 50
    #: The longest that `admit` and `intercept` may keep the event loop.
    blocking_s: ClassVar[float] = 0.1
    #: The longest that an admitted caller waits for an interceptor that waits.
    waits_s: ClassVar[float] = 10.0

    def options(self) -> Mapping[str, Any]:
        """Return the fields of `ServerOptions` that enable the interceptor."""
        return {}

    def headers(self) -> Mapping[str, str]:
        """Return the headers of a caller that may infer, with names in lower case."""
        return {}

    def refusals(self) -> Sequence[RefusedOperation]:
        """Return operations that must be refused."""
        return ()

    def make(self) -> Interceptor:
        """Return the interceptor, made as a server makes it."""
        kind: type[Interceptor] = part_of(self.plugin, "interceptor", self.interceptor)
        return kind(ServerOptions(**self.options()))

    # ------------------------------------------------------------------ admission

    def test_its_options_enable_it(self) -> None:
        assert self.make().enabled, f"'{self.interceptor}' does nothing with the options of the test"

    def test_an_admitted_caller_stays_admitted(self) -> None:
        """However an operation ends, nothing of it counts when it is over."""

        async def ask() -> None:
            made, error = self.make(), Cancelled("the caller has disconnected")
            for number in range(self.repeats):
                caller = _caller(self.headers())
                refusal = await self._refusal(made, caller)
                assert refusal is None, f"inference {number + 1}, after {number} that are over, is refused: {refusal}"
                if number % 3 == 0:
                    caller.answered(InferResponse({}), final=True)
                caller.end(error if number % 3 == 1 else None)
                self._require_sound_watches()

        asyncio.run(ask())

    def test_the_models_that_an_admitted_caller_reaches_are_admitted(self) -> None:
        async def ask() -> None:
            made, caller = self.make(), _caller(self.headers())
            assert await self._refusal(made, caller) is None
            for _ in range(self.repeats):
                inner = Caller("model", parent=caller)
                refusal = await self._refusal(made, inner)
                assert refusal is None, f"a model that an admitted caller reaches is refused: {refusal}"
                inner.end()
                self._require_sound_watches()

        asyncio.run(ask())

    @pytest.mark.parametrize("transport", _TRANSPORTS)
    def test_every_operation_has_a_verdict(self, transport: str) -> None:
        """With or without a model, headers and an address, no exception but an error of Headrace leaves `admit`."""

        async def ask() -> None:
            for operation, model in product(_OPERATIONS, ("", NAME)):
                for caller in (Caller(transport), _caller(self.headers(), transport)):
                    made = self.make()
                    refusal = await self._refusal(made, caller, operation, model)
                    if refusal is not None:
                        made.refused(caller, refusal)  # as core does for every interceptor
                    caller.end(refusal)
                    self._require_sound_watches()
                    assert refusal is None or refusal.message, f"'{operation}' is refused without a text"

        asyncio.run(ask())

    def test_who_may_do_an_operation_agrees_with_what_is_refused(self) -> None:
        """What needs no header is open to everybody, and what is refused without one is not."""

        async def ask() -> None:
            for transport, operation in product(("http", "grpc", "metrics"), _OPERATIONS):
                made, caller = self.make(), Caller(transport, "192.0.2.1")
                who = made.who_may(operation, transport)
                assert who is None or isinstance(who, str), f"who_may returns {who!r}, which is no text"
                refusal = await self._refusal(made, caller, operation)
                caller.end(refusal)
                is_judged = isinstance(refusal, Unauthenticated | PermissionDenied)
                assert not is_judged or who != "", (
                    f"who_may tells that everybody may do '{operation}' over {transport}, but a caller without "
                    f"anything is refused: {refusal}"
                )

        asyncio.run(ask())

    def test_what_it_must_refuse_is_refused(self) -> None:
        async def ask(expected: RefusedOperation) -> None:
            made = self.make()
            for number in range(expected.after):
                refusal = await self._refusal(made, _caller(expected.headers))
                assert refusal is None, f"inference {number + 1} of {expected.after} is refused: {refusal}"
            found = await self._refusal(made, _caller(expected.headers), expected.operation)
            assert type(found) is expected.error, f"{expected}: {found!r}"

        for expected in self._expected_refusals():
            asyncio.run(ask(expected))

    # ------------------------------------------------------------------ the event loop

    def test_it_does_not_block_the_event_loop(self) -> None:
        async def ask() -> list[float]:
            made, times = self.make(), []
            for operation in _OPERATIONS:
                begun = perf_counter()
                with suppress(HeadraceError):
                    _discard(made.admit(_caller(self.headers()), operation, NAME))
                times.append(perf_counter() - begun)
            return times

        quickest = min(asyncio.run(ask()))  # the machine may be busy, but not each time
        assert quickest < self.blocking_s, f"each call of admit keeps the event loop for {quickest:.3f} s"

    def test_a_caller_that_leaves_while_it_waits_leaves_nothing(self) -> None:
        async def ask() -> None:
            made = self.make()
            for _ in range(self.repeats):
                verdict = made.admit(_caller(self.headers()), Operation.INFER, NAME)
                if not isawaitable(verdict):
                    pytest.skip(f"{NOT_RUN}'{self.interceptor}' does not wait at an inference")
                waiting = asyncio.ensure_future(verdict)
                await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.wait([waiting], timeout=self.waits_s)
                assert waiting.done(), "it goes on waiting for a caller that has left"
            refusal = await self._refusal(made, _caller(self.headers()))
            assert refusal is None, f"callers that have left while they waited count: {refusal}"

        asyncio.run(ask())

    def test_its_recorder_takes_every_record_at_once(self) -> None:
        """It raises for none, and does not block: what it is given has no caller who would see that."""

        async def add() -> list[float]:
            recorder, times = self.make().recorder, []
            if recorder is None:
                pytest.skip(f"{NOT_RUN}'{self.interceptor}' has no recorder")
            for record in _RECORDS * 10:
                begun = perf_counter()
                recorder.add(tuple(record))
                times.append(perf_counter() - begun)
            return times

        quickest = min(asyncio.run(add()))
        assert quickest < self.blocking_s, f"each record keeps the event loop for {quickest:.3f} s"

    def test_it_permits_those_that_it_admits(self) -> None:
        """A permitted inference passes without a call: it must be one that a call would admit."""

        async def ask() -> None:
            made, caller = self.make(), _caller(self.headers())
            if made.permits is None:
                pytest.skip(f"{NOT_RUN}'{self.interceptor}' permits no inference")
            assert await self._refusal(made, caller) is None
            refused = [each.headers for each in self.refusals() if each.operation is Operation.INFER and not each.after]
            for headers in refused:
                await self._refusal(made, _caller(headers))
            for form in (str, str.encode):
                given = [form(each.get("authorization", "")) for each in (self.headers(), *refused)]
                found = made.permits.get(given[0], {}).get(NAME, caller.principal)
                assert found == caller.principal, f"it permits an inference of '{caller.principal}' as '{found}'"
                for wrong in given[1:]:
                    assert wrong not in made.permits, f"it permits {dict(made.permits[wrong])} what it refuses"

        asyncio.run(ask())

    def test_its_meters_count_as_it_does(self, tmp_path: Path) -> None:
        """What its meters have begun counts: they begin no inference that `admit` would refuse."""
        if self.make().meters is None:
            pytest.skip(f"{NOT_RUN}'{self.interceptor}' meters no inference")
        given = InferRequest(NAME, {"x": np.ones((1, 1), np.float32)})
        with _serving(tmp_path, {}) as server:
            view = server.engine.resolve(NAME)

        async def ask(expected: RefusedOperation) -> None:
            made, caller = self.make(), _caller(expected.headers)
            assert await self._refusal(made, caller) is None
            made.intercept(given, view, caller)
            meter = (made.meters or {}).get((caller.principal or (caller.peer,), NAME))
            if meter is None or not meter.begin(view, 1):
                return
            meter.take_back(1)
            begun = 1
            while begun < expected.after and meter.begin(view, 1):
                begun += 1
            for number in range(begun, expected.after):
                refusal = await self._refusal(made, _caller(expected.headers))
                assert refusal is None, f"inference {number + 1} of {expected.after} is refused: {refusal}"
            assert not meter.begin(view, 1), f"its meter begins inference {expected.after + 1}, which it must refuse"
            found = await self._refusal(made, _caller(expected.headers))
            assert type(found) is expected.error, f"after {begun - 1} that its meter has begun: {found!r}"

        for expected in self._expected_refusals():
            if expected.operation is Operation.INFER and expected.after:
                asyncio.run(ask(expected))

    # ------------------------------------------------------------------ requests

    def test_a_request_is_kept_or_replaced_by_one_for_the_same_model(self, tmp_path: Path) -> None:
        inputs, parameters = {"x": np.ones((1, 1), np.float32)}, {"of": "the caller"}
        given = InferRequest(NAME, inputs, parameters=parameters)
        with _serving(tmp_path, {}) as server:
            view = server.engine.resolve(NAME)

        async def ask() -> InferRequest | None:
            made, caller = self.make(), _caller(self.headers())
            assert await self._refusal(made, caller) is None
            return made.intercept(given, view, caller)

        found = asyncio.run(ask())
        assert found is None or (isinstance(found, InferRequest) and found.model_name == NAME), repr(found)
        assert (list(inputs), parameters) == (["x"], {"of": "the caller"}), "it changes the request that it was given"

    # ------------------------------------------------------------------ in a server

    def test_a_server_finds_it_and_serves_the_admitted(self, tmp_path: Path) -> None:
        with _serving(tmp_path, self.options(), listen=True) as server:
            names = server.plugins.interceptors.names()
            assert self.interceptor in names, (
                f"no installed distribution brings interceptor '{self.interceptor}', only {', '.join(names)}; add an "
                f'entry point of the group headrace: {self.interceptor} = "{self.plugin}"'
            )
            assert _post(server, f"/v2/models/{NAME}/infer", _JSON, self.headers()) == 200
            assert _call(server, _request(NAME), self.headers()) == "OK"

    def test_a_server_refuses_before_it_reads_the_body(self, tmp_path: Path) -> None:
        """The model is unknown and the body is no request, but the caller is judged first."""
        expected = [each for each in self._expected_refusals() if each.operation is Operation.INFER and not each.after]
        if not expected:
            pytest.skip(f"{NOT_RUN}'{self.interceptor}' refuses no inference by its headers alone")
        with _serving(tmp_path, self.options(), listen=True) as server:
            for each in expected:
                status, code = _STATUS[each.error]
                assert _post(server, _WRONG, b"{", each.headers) == status
                assert _call(server, _request("no_such_model"), each.headers) == code

    async def _refusal(
        self, made: Interceptor, caller: Caller, operation: AnyOperation = Operation.INFER, model: str = NAME
    ) -> HeadraceError | None:
        """Return the error that refuses the operation, or None. The `Watch` of an admitted one watches ``caller``."""
        caller.operation, caller.model = operation, model
        try:
            verdict: Any = made.admit(caller, operation, model)
            if isawaitable(verdict):
                verdict = await asyncio.wait_for(verdict, self.waits_s)
        except HeadraceError as error:
            return error
        assert verdict is None or isinstance(verdict, Watch), f"admit returned {verdict!r}, neither a Watch nor None"
        if verdict is not None:
            caller.watch(_Strict(verdict, self._failures()))
        return None

    def _failures(self) -> list[str]:
        """Return what watches of this check have raised."""
        found: list[str] = self.__dict__.setdefault("_raised", [])
        return found

    def _require_sound_watches(self) -> None:
        assert not self._failures(), f"the Watch raised {self._failures()[0]}"

    def _expected_refusals(self) -> Sequence[RefusedOperation]:
        found = self.refusals()
        if not found:
            pytest.skip(f"{NOT_RUN}'{self.interceptor}' says of nothing that it is refused")
        return found


def _caller(headers: Mapping[str, str], transport: str = "http") -> Caller:
    return Caller(transport, "127.0.0.1", header=headers.get, headers=lambda: tuple(headers.items()))


class _Strict(Watch):
    """Passes on what it is told. Notes in ``failures`` what the watch raises: a `Caller` only logs it."""

    def __init__(self, watch: Watch, failures: list[str]) -> None:
        self._watch, self._failures = watch, failures

    def answered(self, answer: Answer, final: bool) -> None:
        try:
            self._watch.answered(answer, final)
        except BaseException as error:
            self._failures.append(f"{error!r} at an answer")

    def ended(self, outcome: Outcome) -> None:
        try:
            self._watch.ended(outcome)
        except BaseException as error:
            self._failures.append(f"{error!r} at the end")


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
