"""Models that call models, with real instances on real threads.

The texts of refusals are a real Triton 2.51's, recorded from a Python model, but for the deadlocks,
in which Triton hangs.
"""

from __future__ import annotations

import asyncio
import re
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from time import monotonic_ns
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias, cast

import numpy as np
import pytest

from headrace.backends.base import Backend, Call, DeferredInstance, Model, RequestInstance
from headrace.config.option_parts import RateLimitResource
from headrace.errors import Code, HeadraceError, InvalidArgument
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.models.deadlocks import SCAN_S
from headrace.models.local_services import MAX_CALLERS
from headrace.registry import PluginInfo
from headrace.server import Server

CallResult: TypeAlias = "InferResponse | HeadraceError"
CONFIG = """
backend: "asking"
input { name: "x" data_type: TYPE_INT32 dims: [1] } output { name: "y" data_type: TYPE_INT32 dims: [1] }
"""
PATIENCE_S = 20


def instances(number: int) -> str:
    return CONFIG + f"instance_group {{ kind: KIND_CPU count: {number} }}"


DECOUPLED = CONFIG.replace("asking", "later") + "model_transaction_policy { decoupled: true }"


class Asking:
    """The arguments of a model's code: the instance, and the request that it executes."""

    def __init__(self, model: Model, request: InferRequest) -> None:
        assert model.services is not None
        self.name, self.services, self.request = model.name, model.services, request

    @property
    def x(self) -> int:
        return int(np.asarray(self.request.inputs["x"])[0])

    def message(self, target: str, x: Any, **settings: Any) -> InferRequest:
        callers = (*self.request.callers, self.name)
        fields = {"model_name": target, "inputs": {"x": np.array([x], np.int32)}}
        return InferRequest(**{**fields, "callers": callers, "caller": self.request, **settings})

    def infer(self, target: str, x: int, respond: Callable[[Answer, bool], None], **settings: Any) -> Ticket:
        ticket = Ticket(self.message(target, x, **settings), respond)
        self.services.infer(ticket)
        return ticket

    def ask(self, target: str, x: int = 0, **settings: Any) -> CallResult:
        """The last response of ``target``, as ``InferenceRequest.exec`` waits for it."""
        got: list[CallResult] = []
        answered = threading.Event()

        def respond(answer: Answer, final: bool) -> None:
            if answer is not None:
                got.append(answer)
            if final:
                answered.set()

        self.infer(target, x, respond, **settings)
        assert answered.wait(PATIENCE_S), "it hangs"
        return got[-1]

    def give(self, x: int) -> InferResponse:
        return InferResponse({"y": np.array([x], np.int32)})


Code_: TypeAlias = "Callable[[Asking], CallResult]"


class AskingInstance(RequestInstance):
    def __init__(self, model: Model, code: Code_) -> None:
        self.model, self.code = model, code

    def execute_requests(self, requests: Sequence[InferRequest]) -> list[CallResult]:
        return [self.code(Asking(self.model, request)) for request in requests]


class LaterInstance(DeferredInstance):
    """Answers on a thread of its own, so that the instance is free at once."""

    def __init__(self, model: Model, code: Code_) -> None:
        self.model, self.code = model, code

    def accept(self, calls: Sequence[Call]) -> None:
        for call in calls:
            threading.Thread(target=self.answer, args=(call,), daemon=True).start()

    def answer(self, call: Call) -> None:
        call.send(self.code(Asking(self.model, call.request)))


class AskingBackend(Backend):
    name: ClassVar[str] = "asking"
    kind: ClassVar[Any] = AskingInstance
    codes: ClassVar[dict[str, Code_]]

    def load(self, model: Model) -> Any:
        return self.kind(model, self.codes[model.name])


class LaterBackend(AskingBackend):
    name: ClassVar[str] = "later"
    kind: ClassVar[Any] = LaterInstance


class Serve:
    """Serves models, each as ``name=(config, code)``, and sends requests to them."""

    def __init__(self, write_model: Any, make_server: Callable[..., Server]) -> None:
        self._write, self._make = write_model, make_server

    def __call__(
        self,
        scenario: Callable[[Server], Coroutine[Any, Any, None]],
        options: Mapping[str, Any] = MappingProxyType({}),
        **models: tuple[str, Code_],
    ) -> None:
        for name, (config, _) in models.items():
            self._write(name, config)
        AskingBackend.codes = {name: code for name, (_, code) in models.items()}

        async def run() -> None:
            server = self._make(exit_timeout_secs=10, **options)
            for backend in (AskingBackend, LaterBackend):
                server.plugins.backends.add(backend, PluginInfo(backend.name, "tests", "0"))
            async with server:
                await scenario(server)

        asyncio.run(asyncio.wait_for(run(), 60))


@pytest.fixture
def serve(write_model: Any, make_server: Callable[..., Server]) -> Serve:
    return Serve(write_model, make_server)


async def ask(server: Server, model: str, x: int = 0) -> int:
    answer = await server.infer_async(model, {"x": np.array([x], np.int32)})
    return int(np.asarray(answer.outputs["y"])[0])


async def refusal(server: Server, model: str, x: int = 0) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        await ask(server, model, x)
    return caught.value


def deadlock(model: str, path: str) -> str:
    shown = " -> ".join(f"'{name}'" for name in path.split())
    return (
        f"Model {model} - Error when running inference: every instance of model '{model}' waits, directly or through "
        f"others, for this request: {shown}. More instances would help, or one call less"
    )


def identity(asking: Asking) -> CallResult:
    return asking.give(asking.x)


def countdown(asking: Asking) -> CallResult:
    return asking.ask(asking.name, asking.x - 1) if asking.x else asking.give(7)


def passes_to(target: str) -> Code_:
    return lambda asking: asking.ask(target, asking.x)


def test_a_model_is_answered_by_another(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        assert await ask(server, "a", 5) == 5

    serve(scenario, a=(CONFIG, passes_to("b")), b=(CONFIG, identity))


def test_a_call_of_itself_with_no_other_instance_is_refused_with_the_path(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        error = await refusal(server, "a", 1)
        assert (error.code, error.message) == (Code.UNAVAILABLE, deadlock("a", "a a"))
        assert await ask(server, "a") == 7

    serve(scenario, a=(CONFIG, countdown))


def test_a_recursion_is_as_deep_as_there_are_instances(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        assert await ask(server, "a", 2) == 7
        error = await refusal(server, "a", 3)
        assert error.message == deadlock("a", "a a a a")
        assert await ask(server, "a", 2) == 7

    serve(scenario, a=(instances(3), countdown))


def test_a_circle_of_two_is_refused_with_the_path(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        assert (await refusal(server, "a")).message == deadlock("a", "a b a")
        assert (await refusal(server, "b")).message == deadlock("b", "b a b")

    serve(scenario, a=(CONFIG, passes_to("b")), b=(CONFIG, passes_to("a")))


def test_two_chains_in_a_deadlock_cost_one_error(serve: Serve) -> None:
    together = threading.Barrier(2)

    def crosses_to(target: str) -> Code_:
        def code(asking: Asking) -> CallResult:
            if not asking.x:
                return asking.give(0)
            together.wait(PATIENCE_S)
            return asking.ask(target)

        return code

    async def scenario(server: Server) -> None:
        for _ in range(5):
            answers = await asyncio.gather(ask(server, "a", 1), ask(server, "b", 1), return_exceptions=True)
            (error,) = (answer for answer in answers if isinstance(answer, HeadraceError))
            assert error.message in (deadlock("a", "b a b"), deadlock("b", "a b a"))
            assert 0 in answers

    serve(scenario, a=(CONFIG, crosses_to("b")), b=(CONFIG, crosses_to("a")))


def test_many_chains_without_a_circle_all_answer(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        answers = await asyncio.gather(*(ask(server, "a", number) for number in range(256)))
        assert answers == list(range(256))

    serve(
        scenario,
        a=(instances(8), passes_to("b")),
        b=(instances(2), passes_to("c")),
        c=(CONFIG, passes_to("d")),
        d=(CONFIG, identity),
    )


def limited(units: int) -> str:
    resources = f'resources {{ name: "R" count: {units} }}'
    return CONFIG + f"instance_group {{ kind: KIND_CPU rate_limiter {{ {resources} }} }}"


def test_a_call_that_needs_the_resources_of_its_caller_is_refused(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        assert (await refusal(server, "a")).message == deadlock("b", "a b a")
        assert await ask(server, "b", 3) == 3
        assert (await refusal(server, "a")).message == deadlock("b", "a b a")

    models = {"a": (limited(1), passes_to("b")), "b": (limited(1), identity)}
    serve(scenario, {"rate_limit": "execution_count"}, **models)


def test_a_call_of_a_model_that_waits_for_somebody_elses_resources_is_answered(serve: Serve) -> None:
    """``slow`` has them for longer than a deadlock takes to be found."""

    began = threading.Event()

    def slow(asking: Asking) -> CallResult:
        began.set()
        threading.Event().wait(1)
        return asking.give(1)

    async def scenario(server: Server) -> None:
        inference = asyncio.ensure_future(ask(server, "slow"))
        while not began.is_set():
            await asyncio.sleep(0)
        assert await ask(server, "a", 5) == 5
        await inference

    models = {"a": (CONFIG, passes_to("b")), "b": (limited(1), identity), "slow": (limited(1), slow)}
    serve(scenario, {"rate_limit": "execution_count"}, **models)


def test_a_deadlock_that_closes_when_a_third_model_releases_its_resources_is_refused(serve: Serve) -> None:
    """``a`` holds 2 of 4 and calls ``b``, which needs 3; meanwhile ``c`` holds 2 for a while. Nothing else happens."""
    begun, gate = threading.Event(), threading.Event()

    def holds(asking: Asking) -> CallResult:
        begun.set()
        gate.wait(PATIENCE_S)
        return asking.give(1)

    async def scenario(server: Server) -> None:
        holding = asyncio.ensure_future(ask(server, "c"))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        refused = asyncio.ensure_future(refusal(server, "a"))
        await asyncio.sleep(3 * SCAN_S)  # it is seen, and is no deadlock: c may return
        gate.set()
        assert await holding == 1
        assert (await refused).message == deadlock("b", "a b a")
        assert await ask(server, "b", 3) == 3

    models = {"a": (limited(2), passes_to("b")), "b": (limited(3), identity), "c": (limited(2), holds)}
    resources = (RateLimitResource("R", 4),)
    serve(scenario, {"rate_limit": "execution_count", "rate_limit_resource": resources}, **models)


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace("asking", "later")], ids=["at once", "later"])
def test_calls_are_cancelled_with_the_request_for_which_they_were_made(serve: Serve, config: str) -> None:
    """``d`` has the only instance that ``c`` could be answered by, and holds it as long as the test runs."""
    begun, gate, has_called = threading.Event(), threading.Event(), threading.Event()
    got: list[CallResult] = []

    def holds(asking: Asking) -> CallResult:
        begun.set()
        gate.wait(PATIENCE_S)
        return asking.give(asking.x)

    def tells(asking: Asking) -> CallResult:
        has_called.set()
        got.append(asking.ask("b"))
        return got[-1]

    async def scenario(server: Server) -> None:
        holding = asyncio.ensure_future(ask(server, "c", 5))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        leaving = asyncio.ensure_future(ask(server, "a"))
        await asyncio.to_thread(has_called.wait, PATIENCE_S)
        leaving.cancel()
        (a,), (b,), (c,) = (server.served(name) for name in "abc")
        until_ns = monotonic_ns() + PATIENCE_S * 500_000_000
        while a.model_queue.in_flight or b.model_queue.in_flight or c.model_queue.pending:
            assert monotonic_ns() < until_ns
            await asyncio.sleep(0.01)
        gate.set()
        assert await holding == 5
        assert [answer.code for answer in got if isinstance(answer, HeadraceError)] == [Code.CANCELLED]

    serve(scenario, a=(config, tells), b=(config, passes_to("c")), c=(CONFIG, holds))


def test_chains_that_may_be_deadlocks_or_not_all_end(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        answers = await asyncio.gather(*(ask(server, "a", 2) for _ in range(64)), return_exceptions=True)
        assert all(answer == 7 or isinstance(answer, HeadraceError) for answer in answers)
        assert await ask(server, "a", 2) == 7

    serve(scenario, a=(instances(4), countdown))


def test_a_model_that_answers_later_may_call_itself_with_one_instance(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        assert await ask(server, "a", 30) == 7

    serve(scenario, a=(CONFIG.replace("asking", "later"), countdown))


def test_a_deadlock_through_a_model_that_answers_later_is_found(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        assert (await refusal(server, "a")).message == deadlock("a", "a b a")

    serve(scenario, a=(CONFIG, passes_to("b")), b=(CONFIG.replace("asking", "later"), passes_to("a")))


def test_of_several_calls_at_once_the_one_that_can_be_answered_keeps_the_rest_from_a_deadlock(serve: Serve) -> None:
    """Only when what could go on has, and is not enough, is the call that cannot be answered refused."""

    def both(asking: Asking) -> CallResult:
        got: dict[str, Answer] = {}
        done = threading.Semaphore(0)

        def keep(target: str) -> Callable[[Answer, bool], None]:
            def respond(answer: Answer, final: bool) -> None:
                got[target] = answer
                done.release()

            return respond

        for target in ("a", "b"):
            asking.infer(target, 1, keep(target))
        for _ in range(2):
            assert done.acquire(timeout=PATIENCE_S)
        assert isinstance(got["b"], InferResponse)
        assert isinstance(got["a"], HeadraceError)
        return got["a"]

    async def scenario(server: Server) -> None:
        assert (await refusal(server, "a")).message == deadlock("a", "a a")

    serve(scenario, a=(CONFIG, both), b=(CONFIG, identity))


def test_an_endless_recursion_that_holds_nothing_ends(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        error = await refusal(server, "a")
        assert error.code is Code.INVALID_ARGUMENT
        assert error.message == (
            f"Model a - Error when running inference: {MAX_CALLERS + 1} models wait for this request, one behind the "
            f"other; the limit is {MAX_CALLERS}"
        )

    serve(scenario, a=(CONFIG.replace("asking", "later"), passes_to("a")))


UNKNOWN = "Failed for execute the inference request. Model '{}' is not ready."


@pytest.mark.parametrize(
    ("settings", "code", "text"),
    [
        ({"model_name": "nope"}, Code.NOT_FOUND, UNKNOWN.format("nope")),
        ({"model_version": "7"}, Code.NOT_FOUND, UNKNOWN.format("b")),
        ({"model_version": "x"}, Code.INVALID_ARGUMENT, UNKNOWN.format("b")),
        ({"outputs": ["q"]}, Code.INVALID_ARGUMENT, "unexpected inference output 'q' for model 'b'"),
        (
            {"inputs": {"x": np.zeros(1, np.float32)}},
            Code.INVALID_ARGUMENT,
            "[request id: <id_unknown>] inference input 'x' data-type is 'FP32', but model 'b' expects 'INT32'",
        ),
        (
            {"inputs": {}},
            Code.INVALID_ARGUMENT,
            "[request id: <id_unknown>] expected 1 inputs but got 0 inputs for model 'b'. Got input(s) [], but missing "
            "required input(s) ['x']. Please provide all required input(s).",
        ),
    ],
)
def test_a_refusal_is_an_answer_in_tritons_words(serve: Serve, settings: dict[str, Any], code: Code, text: str) -> None:
    async def scenario(server: Server) -> None:
        error = await refusal(server, "a")
        target = settings.get("model_name", "b")
        assert error.code is code
        assert re.sub(r"\[request id: <id_unknown>\] (?=unexpected)", "", error.message).startswith(
            f"Model {target} - Error when running inference: {text}"
        )

    serve(scenario, a=(CONFIG, lambda asking: asking.ask("b", **settings)), b=(CONFIG, identity))


def test_an_error_of_the_called_model_is_passed_on_unchanged(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        error = await refusal(server, "a")
        assert (error.code, error.message) == (Code.INVALID_ARGUMENT, "no such thing")

    serve(scenario, a=(CONFIG, passes_to("b")), b=(CONFIG, lambda asking: InvalidArgument("no such thing")))


def test_a_decoupled_model_is_called_only_by_callers_of_many_responses(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        assert await ask(server, "ready", 3) == 3
        assert await ask(server, "plain", 3) == 3
        assert (await refusal(server, "unready")).message == (
            "Model many - Error when running inference: Model many is using the decoupled. The current BLS request "
            "call doesn't support models using the decoupled transaction policy. Please use 'decoupled=True' argument "
            "to the 'exec' or 'async_exec' calls for decoupled models.'"
        )

    serve(
        scenario,
        many=(DECOUPLED, identity),
        one=(CONFIG, identity),
        ready=(CONFIG, lambda asking: asking.ask("many", asking.x, decoupled=True)),
        plain=(CONFIG, lambda asking: asking.ask("one", asking.x, decoupled=True)),
        unready=(CONFIG, passes_to("many")),
    )


def test_a_cancelled_call_is_removed_from_the_queue(serve: Serve) -> None:
    gate, begun = threading.Event(), threading.Event()

    def cancels(asking: Asking) -> CallResult:
        got: list[Answer] = []
        answered = threading.Event()

        def respond(answer: Answer, final: bool) -> None:
            got.append(answer)
            answered.set()

        asking.services.cancel(asking.infer("b", 1, respond))
        assert answered.wait(PATIENCE_S)
        gate.set()
        assert isinstance(got[0], HeadraceError)
        return got[0]

    def holds(asking: Asking) -> CallResult:
        begun.set()
        gate.wait(PATIENCE_S)
        return asking.give(1)

    async def scenario(server: Server) -> None:
        holding = asyncio.ensure_future(ask(server, "b"))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        assert (await refusal(server, "a")).code is Code.CANCELLED
        assert await holding == 1

    serve(scenario, a=(CONFIG, cancels), b=(CONFIG, holds))


def test_services_of_a_server_that_has_stopped_refuse(serve: Serve) -> None:
    models: list[Asking] = []

    def keeps(asking: Asking) -> CallResult:
        models.append(asking)
        return asking.give(0)

    async def scenario(server: Server) -> None:
        await ask(server, "a")

    serve(scenario, a=(CONFIG, keeps))
    answer = models[0].ask("a")
    assert isinstance(answer, HeadraceError)
    assert answer.message == "the server has stopped"
    with pytest.raises(HeadraceError, match="the server has stopped"):
        models[0].services.is_model_ready("a", "")


def test_a_call_is_forgotten_when_it_is_answered(serve: Serve) -> None:
    """Without the collector, which these tests have turned off."""
    sent: list[weakref.ref[Any]] = []

    def asks(asking: Asking) -> CallResult:
        message = asking.message("b", asking.x)
        sent.append(weakref.ref(message.inputs["x"]))
        answer = asking.services.ask(message)
        assert isinstance(answer, InferResponse)
        return asking.give(int(np.asarray(answer.outputs["y"])[0]))

    async def scenario(server: Server) -> None:
        for number in range(3):
            assert await ask(server, "a", number) == number
        while any(array() is not None for array in sent[:-1]):  # the last may still be a local variable
            await asyncio.sleep(0.01)

    serve(scenario, a=(CONFIG, asks), b=(CONFIG, lambda asking: asking.give(asking.x)))


def test_a_call_on_the_event_loop_is_refused_because_it_would_wait_for_itself(serve: Serve) -> None:
    models: list[Asking] = []

    def keeps(asking: Asking) -> CallResult:
        models.append(asking)
        return asking.give(1)

    async def scenario(server: Server) -> None:
        assert await ask(server, "a") == 1
        (asking,) = models
        answer = asking.services.ask(asking.message("b", 0))  # as a finalizer might
        assert isinstance(answer, HeadraceError)
        assert answer.message == "a call of another model would block the event loop that answers it"

    serve(scenario, a=(CONFIG, keeps), b=(CONFIG, identity))


# ---------------------------------------------------------------------------
# Deadlines
# ---------------------------------------------------------------------------

#: Waits for others to join it for longer than any test runs.
PATIENT = CONFIG.replace("dims: [1]", "dims: [-1]").replace("backend:", "max_batch_size: 8 backend:") + (
    "dynamic_batching { preferred_batch_size: [8] max_queue_delay_microseconds: 600000000 }"
)
EXPIRED = "Model patient - Error when running inference: Request timeout expired"


async def ask_by(server: Server, model: str, left_ns: int, **fields: Any) -> Answer:
    """Return the answer of ``model`` to a caller with a deadline."""
    request = InferRequest(model, {"x": np.array([3], np.int32)}, **fields)
    request.expire_at(monotonic_ns() + left_ns)
    answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
    server.submit(Ticket(request, lambda answer, final: answered.set_result(answer)))
    return await answered


def passes_row_to(target: str) -> Code_:
    return lambda asking: asking.ask(target, cast("int", [asking.x]))


@pytest.mark.parametrize("through", ["a", "b"])
def test_a_call_ends_with_the_time_of_the_request_for_which_it_was_sent(serve: Serve, through: str) -> None:
    async def scenario(server: Server) -> None:
        answer = await ask_by(server, through, 50_000_000)
        assert isinstance(answer, HeadraceError)
        assert answer.code is Code.UNAVAILABLE
        assert answer.message.endswith("Error when running inference: Request timeout expired")
        (patient,) = server.served("patient")
        assert patient.snapshot().pending == 0

    serve(scenario, a=(CONFIG, passes_row_to("patient")), b=(CONFIG, passes_to("a")), patient=(PATIENT, identity))


def test_an_expired_call_is_refused_and_never_queued(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        answer = await ask_by(server, "a", -1)
        assert isinstance(answer, HeadraceError)
        assert answer.message == EXPIRED
        (patient,) = server.served("patient")
        assert patient.snapshot().fail.count == 0

    serve(scenario, a=(CONFIG, passes_row_to("patient")), patient=(PATIENT, identity))


def until_cancelled(asking: Asking) -> CallResult:
    """Answers after its request is cancelled."""
    pause = threading.Event()
    while not asking.request.cancelled:
        pause.wait(0.001)
    return asking.give(1)


@pytest.mark.parametrize("config", [CONFIG, CONFIG.replace("asking", "later")], ids=["at once", "later"])
def test_caller_of_an_expired_call_that_was_executed_gets_its_error(serve: Serve, config: str) -> None:
    """He waits for that, and would hold his instance for ever."""

    async def scenario(server: Server) -> None:
        for _ in range(2):
            answer = await ask_by(server, "a", 50_000_000)
            assert isinstance(answer, HeadraceError)
            assert answer.message == "Model b - Error when running inference: Request timeout expired"

    serve(scenario, a=(CONFIG, passes_to("b")), b=(config, until_cancelled))


def test_a_call_that_is_answered_in_time_is_answered_as_ever(serve: Serve) -> None:
    async def scenario(server: Server) -> None:
        for _ in range(3):
            assert isinstance(await ask_by(server, "a", 600_000_000_000), InferResponse)

    serve(scenario, a=(CONFIG, passes_to("b")), b=(CONFIG, identity))


def test_a_call_without_a_timeout_has_the_rest_of_its_callers_timeout(serve: Serve) -> None:
    seen: list[int] = []

    def tells(asking: Asking) -> CallResult:
        seen.append(asking.request.timeout_us)
        return asking.give(1)

    def calls(asking: Asking) -> CallResult:
        asking.ask("b", 1)
        return asking.ask("b", 1, timeout_us=77)

    async def scenario(server: Server) -> None:
        for timeout_us in (5_000_000, 1, 0):
            await server.infer_async("a", {"x": np.array([1], np.int32)}, timeout_us=timeout_us)
        left, own, least, _, none, _ = seen
        assert 1 < left < 5_000_000
        assert (own, least, none) == (77, 1, 0)

    serve(scenario, a=(CONFIG, calls), b=(CONFIG, tells))


#: Runs two requests at once, and not one.
PAIRED = CONFIG.replace("dims: [1]", "dims: [-1]").replace("backend:", "max_batch_size: 2 backend:") + (
    "dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 600000000 }"
)


async def ask_pair(server: Server, *requests: InferRequest) -> list[Answer]:
    """Return the answers to two requests that are executed in one batch."""
    answered: list[asyncio.Future[Answer]] = [asyncio.get_running_loop().create_future() for _ in requests]

    def answer_to(future: asyncio.Future[Answer]) -> Callable[[Answer, bool], None]:
        return lambda answer, final: future.set_result(answer)

    for request, future in zip(requests, answered, strict=True):
        server.submit(Ticket(request, answer_to(future)))
    return await asyncio.gather(*answered)


def pair(**first: Any) -> tuple[InferRequest, InferRequest]:
    inputs = {"x": np.array([[3]], np.int32)}
    return InferRequest("a", inputs, **first), InferRequest("a", inputs)


def asks_for_all(target: str, rows: bool = False) -> Code_:
    """Sends calls for the first request of its batch, as `InferenceRequest.exec` does."""
    batch: list[InferRequest] = []
    x = cast("int", [3]) if rows else 3

    def ask(asking: Asking) -> CallResult:
        batch.append(asking.request)
        asking.request = batch[0]
        answer = asking.ask(target, x)
        return InferResponse({"y": np.array([[1]], np.int32)}) if isinstance(answer, InferResponse) else answer

    return ask


@pytest.mark.parametrize("backend", ["asking", "later"])
def test_the_time_of_one_request_ends_no_call_for_another_of_its_batch(serve: Serve, backend: str) -> None:
    impatient, patient = pair()
    over_ns = monotonic_ns() + 100_000_000
    impatient.expire_at(over_ns)
    executed = threading.Event()

    def outlasts_the_first(asking: Asking) -> CallResult:
        pause = threading.Event()
        while monotonic_ns() < over_ns + 50_000_000:
            pause.wait(0.001)
        return asking.give(1)

    def asks_once_executed(asking: Asking) -> CallResult:
        assert backend == "asking" or executed.wait(PATIENCE_S)
        asking.request = impatient
        answer = asking.ask("b", 3)
        return InferResponse({"y": np.array([[1]], np.int32)}) if isinstance(answer, InferResponse) else answer

    async def scenario(server: Server) -> None:
        answers = asyncio.ensure_future(ask_pair(server, impatient, patient))
        await until_executed(server, backend, executed)
        assert isinstance((await answers)[1], InferResponse)

    config = PAIRED.replace("asking", backend)
    serve(scenario, a=(config, asks_once_executed), b=(instances(2), outlasts_the_first))


async def until_executed(server: Server, backend: str, executed: threading.Event) -> None:
    """Set ``executed`` once the instance of ``a``, if it answers later, has all that it will have and is free."""
    (served,) = server.served("a")
    (executor,) = served.executors
    while backend == "later" and (executor.executing or not executor.unanswered):
        await asyncio.sleep(0)
    executed.set()


def test_a_call_for_one_request_ends_with_its_time_when_its_execution_has_returned(serve: Serve) -> None:
    executed = threading.Event()

    def asks_once_executed(asking: Asking) -> CallResult:
        assert executed.wait(PATIENCE_S)
        return passes_row_to("patient")(asking)

    async def scenario(server: Server) -> None:
        answer = asyncio.ensure_future(ask_by(server, "a", 100_000_000))
        await asyncio.sleep(0)
        await until_executed(server, "later", executed)
        error = await answer
        assert isinstance(error, HeadraceError)
        assert error.message == EXPIRED

    serve(scenario, a=(CONFIG.replace("asking", "later"), asks_once_executed), patient=(PATIENT, identity))


def test_a_call_for_a_batch_ends_when_all_of_it_have_no_time_left(serve: Serve) -> None:
    pair_ = pair()
    for left_ns, request in zip((1_000_000, 50_000_000), pair_, strict=True):
        request.expire_at(monotonic_ns() + left_ns)

    async def scenario(server: Server) -> None:
        for answer in await ask_pair(server, *pair_):
            assert isinstance(answer, HeadraceError)
            assert answer.message == EXPIRED

    serve(scenario, a=(PAIRED, asks_for_all("patient", rows=True)), patient=(PATIENT, identity))


def test_a_call_for_a_batch_has_the_timeout_of_the_one_with_most_time(serve: Serve) -> None:
    seen: list[int] = []

    def tells(asking: Asking) -> CallResult:
        seen.append(asking.request.timeout_us)
        return asking.give(1)

    async def scenario(server: Server) -> None:
        await ask_pair(server, *pair(timeout_us=1))
        assert seen == [0, 0]

    serve(scenario, a=(PAIRED, asks_for_all("b")), b=(CONFIG, tells))
