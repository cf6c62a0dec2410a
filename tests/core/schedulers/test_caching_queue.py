"""The model queue with a response cache: executed requests, followers, and all answers. The test plays the instance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format

from headrace.backends.base import Device
from headrace.caches.base import CachedResponse, ResponseCache
from headrace.caches.keys import BYPASS
from headrace.caches.local import LocalCache, LocalCacheParameters
from headrace.caches.model_cache import LARGE_BYTES, ModelCache, ServerCache
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import BackendError, Cancelled, HeadraceError, InvalidArgument, Unavailable
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.models.signature import Signature
from headrace.off_loop import OffLoopWork
from headrace.schedulers.base import InstanceInfo, ScheduledModel, Scheduler
from headrace.schedulers.caching_queue import CachingModelQueue
from headrace.schedulers.dynamic import DirectScheduler, DynamicScheduler
from headrace.telemetry.statistics import ModelStatistics
from headrace_testing.simulated_parts import ManualClock, SimulatedInstance
from tests.core.conftest import make_ticket

MODEL = """name: "m" max_batch_size: 4 response_cache { enable: true }
input { name: "x" data_type: TYPE_FP32 dims: [-1] }
output { name: "y" data_type: TYPE_FP32 dims: [-1] } output { name: "z" data_type: TYPE_FP32 dims: [-1] }"""


def config(text: str = "") -> ModelConfig:
    return text_format.Parse(MODEL + text, ModelConfig())


class CachedStage:
    """A model queue with a cache, an instance that the test plays, and the answers of the callers by name."""

    def __init__(
        self,
        settings: str = "",
        cache: ResponseCache | None = None,
        kind: type[Scheduler] = DirectScheduler,
        size: int = 1 << 20,
    ) -> None:
        self.clock, self.statistics = ManualClock(), ModelStatistics()
        self.local = LocalCache(LocalCacheParameters(size))
        self.off_loop_work = OffLoopWork()
        loop, model = asyncio.get_running_loop(), config(settings)
        self.server = ServerCache(cache or self.local, self.off_loop_work, loop)
        signature = Signature("m", model)
        model_cache = ModelCache(self.server, "m", "7", b"identity", signature)
        info = InstanceInfo("m_0_0", Device("cpu"), 4)
        scheduled = ScheduledModel(model, [info], signature.inputs, signature.outputs)
        self.model_queue = CachingModelQueue(kind, scheduled, self.statistics, loop, model_cache, self.clock)
        self.wrong: list[str] = []
        self.instance = SimulatedInstance(self.model_queue.sources[0], self.wrong)
        self.answers: dict[str, list[Answer]] = {}
        self.tickets: dict[str, Ticket] = {}

    def send(self, name: str, value: float = 1.0, floats: int = 4, **fields: Any) -> Ticket:
        heard = self.answers[name] = []
        x = np.full((1, floats), value, np.float32)
        ticket = make_ticket("m", {"x": x}, lambda answer, final: heard.append(answer), id=name, **fields)
        ticket.arrival_ns = self.clock.now_ns()
        self.model_queue.submit(ticket)
        self.tickets[name] = ticket
        return ticket

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def execute(self, answer: HeadraceError | None = None) -> list[str]:
        """Let the instance run its batch: ``y`` is twice ``x``. Return the ids of the requests."""
        await self.settle()
        if not self.instance.batch:
            self.instance.poll()
        batch = list(self.instance.batch)
        self.instance.batch.clear()
        answers = [answer or doubled(ticket) for ticket in batch]
        self.model_queue.sources[0].deliver(batch, answers)
        return [ticket.request.id for ticket in batch]

    def response(self, name: str) -> InferResponse:
        (answer,) = self.answers[name]
        assert isinstance(answer, InferResponse), answer
        return answer

    def y(self, name: str) -> list[float]:
        return list(np.asarray(self.response(name).outputs["y"]).ravel())

    def counts(self) -> tuple[int, int]:
        """Hits and misses."""
        numbers = self.statistics.snapshot()
        return numbers.cache_hit.count, numbers.cache_miss.count


def doubled(ticket: Ticket) -> InferResponse:
    x: Any = ticket.request.inputs["x"]
    outputs = {"y": x * 2, "z": x * 3}
    wanted = ticket.request.outputs or outputs
    return InferResponse(
        {name: outputs[name] for name in outputs if name in wanted}, {"note": "n"}, "m", "7", ticket.request.id
    )


def staged(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 90))

    run.__name__ = test.__name__
    return run


# ---------------------------------------------------------------------------
# Hits
# ---------------------------------------------------------------------------


@staged
async def test_repeated_request_is_answered_at_once_under_its_own_id() -> None:
    stage = CachedStage()
    stage.send("first")
    assert await stage.execute() == ["first"]
    stage.send("second")
    answer = stage.response("second")
    assert (answer.id, answer.model_name, answer.model_version) == ("second", "m", "7")
    assert stage.y("second") == stage.y("first") == [2.0] * 4
    assert answer.parameters == {"note": "n"}
    assert (stage.model_queue.in_flight, stage.model_queue.pending) == (0, 0)
    assert stage.counts() == (1, 1)


@staged
async def test_hits_share_one_read_only_array() -> None:
    stage = CachedStage()
    stage.send("first")
    await stage.execute()
    stage.send("a")
    stage.send("b")
    one, other = np.asarray(stage.response("a").outputs["y"]), np.asarray(stage.response("b").outputs["y"])
    assert np.shares_memory(one, other)
    assert not np.shares_memory(one, np.asarray(stage.response("first").outputs["y"]))
    with pytest.raises(ValueError, match="read-only"):
        one[:] = 0
    assert stage.response("a").outputs is not stage.response("b").outputs


@staged
async def test_another_input_is_another_question() -> None:
    stage = CachedStage()
    stage.send("one", 1.0)
    stage.send("other", 2.0)
    assert [*await stage.execute(), *await stage.execute()] == ["one", "other"]
    assert stage.y("other") == [4.0] * 4
    assert stage.counts() == (0, 2)


@staged
async def test_a_request_gets_its_requested_outputs_from_an_entry_with_others() -> None:
    stage = CachedStage()
    for name, outputs in (("y", ["y"]), ("z", ["z"]), ("all", [])):
        stage.send(name, outputs=outputs)
        assert await stage.execute() == [name]
    for name, outputs in (("y again", ["y"]), ("z again", ["z"]), ("all again", ["z", "y"])):
        stage.send(name, outputs=outputs)
    assert [list(stage.response(name).outputs) for name in ("y again", "z again", "all again")] == [
        ["y"],
        ["z"],
        ["y", "z"],
    ]


@staged
async def test_parameters_that_a_model_can_read_are_part_of_the_question() -> None:
    stage = CachedStage()
    for number, parameters in enumerate(({}, {"mood": 1}, {"mood": True}, {"mood": 1, "b": "x"})):
        stage.send(str(number), parameters=parameters)
        assert await stage.execute() == [str(number)]
    stage.send("again", parameters={"b": "x", "mood": 1}, priority=3, timeout_us=5)
    assert stage.counts() == (1, 4)


@pytest.mark.parametrize("fields", [{"parameters": {BYPASS: True}}, {"sequence_id": 4}, {"sequence_start": True}])
def test_request_that_bypasses_the_cache_is_executed_and_not_stored(fields: dict[str, Any]) -> None:
    @staged
    async def scene() -> None:
        stage = CachedStage()
        stage.send("first", **fields)
        assert await stage.execute() == ["first"]
        stage.send("second")
        assert await stage.execute() == ["second"]
        stage.send("third", **fields)
        assert await stage.execute() == ["third"]
        assert stage.counts() == (0, 1)

    scene()


@staged
async def test_a_bypass_that_is_no_boolean_is_refused_by_name() -> None:
    stage = CachedStage()
    with pytest.raises(InvalidArgument, match="parameter 'bypass_response_cache' is 'perhaps', expected true or false"):
        stage.send("first", parameters={BYPASS: "perhaps"})
    assert stage.model_queue.in_flight == 0
    stage.send("second", parameters={BYPASS: False})
    stage.send("third")
    assert await stage.execute() == ["second"]
    assert stage.y("third") == [2.0] * 4


@staged
async def test_errors_are_not_kept() -> None:
    stage = CachedStage()
    stage.send("first")
    await stage.execute(BackendError("no"))
    stage.send("second")
    assert await stage.execute() == ["second"]
    assert stage.counts() == (0, 2)


@staged
async def test_hits_count_as_successes_and_not_as_inferences() -> None:
    stage = CachedStage()
    stage.send("first")
    stage.clock.advance(3_000)
    await stage.execute()
    for name in "abc":
        stage.send(name)
    numbers = stage.statistics.snapshot()
    assert (numbers.success.count, numbers.queue.count) == (3, 3)  # the played instance counts nothing
    assert numbers.executions.inference_count == 0
    assert stage.counts() == (3, 1)


@staged
async def test_answers_keep_the_order_of_the_requests_hits_included() -> None:
    stage = CachedStage("dynamic_batching { preserve_ordering: true }", kind=DynamicScheduler)
    stage.send("kept")
    await stage.execute()
    stage.send("slow", 2.0)
    stage.send("hit")
    assert stage.answers["hit"] == []
    await stage.execute()
    assert stage.y("slow") == [4.0] * 4
    assert stage.y("hit") == [2.0] * 4


# ---------------------------------------------------------------------------
# One execution for many
# ---------------------------------------------------------------------------


@staged
async def test_equal_requests_in_flight_wait_for_the_first() -> None:
    stage = CachedStage()
    for name in "abcd":
        stage.send(name)
    assert stage.model_queue.in_flight == 4
    assert await stage.execute() == ["a"]
    assert [stage.y(name) for name in "abcd"] == [[2.0] * 4] * 4
    assert [stage.response(name).id for name in "abcd"] == list("abcd")
    assert stage.counts() == (3, 1)
    assert stage.model_queue.in_flight == 0


@staged
async def test_a_follower_becomes_the_leader_if_the_leader_is_cancelled_while_it_waits() -> None:
    stage = CachedStage()
    for name in "abc":
        stage.send(name)
    stage.tickets["a"].cancel()
    assert isinstance(stage.answers["a"][0], Cancelled)
    assert await stage.execute() == ["b"]
    assert stage.y("b") == stage.y("c") == [2.0] * 4


@staged
async def test_a_follower_becomes_the_leader_if_the_leader_is_cancelled_during_its_execution() -> None:
    stage = CachedStage()
    for name in "abc":
        stage.send(name)
    await stage.settle()
    stage.instance.poll()
    stage.tickets["a"].cancel()
    assert await stage.execute(Cancelled("gone")) == ["a"]
    assert stage.answers["b"] == []
    assert await stage.execute() == ["b"]
    assert stage.y("c") == [2.0] * 4


@staged
async def test_a_follower_becomes_the_leader_if_the_leader_fails_and_then_all_fail() -> None:
    stage = CachedStage()
    for name in "abcd":
        stage.send(name)
    assert await stage.execute(BackendError("no")) == ["a"]
    assert await stage.execute(BackendError("no")) == ["b"]
    assert [*await stage.execute(), *await stage.execute()] == ["c", "d"]
    assert isinstance(stage.answers["b"][0], BackendError)
    assert stage.counts() == (0, 4)
    stage.send("later")
    assert await stage.execute() == ["later"]  # those went each for itself


@staged
async def test_a_cancelled_follower_is_answered_and_the_others_wait_on() -> None:
    stage = CachedStage()
    for name in "abc":
        stage.send(name)
    stage.tickets["b"].cancel()
    stage.tickets["b"].cancel()
    assert [type(answer) for answer in stage.answers["b"]] == [Cancelled]
    await stage.execute()
    assert stage.y("a") == stage.y("c") == [2.0] * 4
    assert len(stage.answers["b"]) == 1
    assert stage.statistics.cancelled.count == 1


@staged
async def test_urgent_requests_and_calls_of_models_do_not_wait_for_another_request() -> None:
    stage = CachedStage()
    stage.send("a")
    stage.send("urgent", priority=1)
    stage.send("call", callers=("other",))
    assert [*await stage.execute(), *await stage.execute(), *await stage.execute()] == ["a", "urgent", "call"]


@staged
async def test_a_full_queue_refuses_the_new_leader_and_the_next_follower_tries() -> None:
    policy = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    stage = CachedStage(policy, kind=DynamicScheduler)
    stage.send("a")
    await stage.settle()
    stage.instance.poll()
    for name in "bcd":
        stage.send(name)
    stage.send("other", 2.0)  # fills the queue
    running = list(stage.instance.batch)
    stage.instance.batch.clear()
    stage.model_queue.sources[0].deliver(running, [BackendError("no")])
    for name in "bcd":
        assert isinstance(stage.answers[name][0], Unavailable)
    assert stage.statistics.rejected.count == 3
    assert await stage.execute() == ["other"]
    assert stage.model_queue.in_flight == 0


@staged
async def test_a_refused_leader_leaves_no_flight_behind() -> None:
    policy = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    stage = CachedStage(policy, kind=DynamicScheduler)
    stage.send("fills", 3.0)
    with pytest.raises(Unavailable, match="Exceeds maximum queue size"):
        stage.send("refused")
    assert await stage.execute() == ["fills"]
    stage.send("again")
    assert await stage.execute() == ["again"]
    assert stage.answers["refused"] == []


@staged
async def test_two_responses_of_one_request_are_not_cached() -> None:
    stage = CachedStage()
    ticket = stage.send("a")
    stage.send("b")
    await stage.settle()
    stage.instance.poll()
    stage.instance.batch.clear()
    stage.model_queue.progress(ticket, doubled(ticket))
    stage.model_queue.deliver([ticket], [doubled(ticket)])
    assert await stage.execute() == ["b"]


@staged
async def test_a_response_before_the_final_answer_is_cached() -> None:
    stage = CachedStage()
    ticket = stage.send("a")
    stage.send("b")
    await stage.settle()
    stage.instance.poll()
    stage.instance.batch.clear()
    stage.model_queue.progress(ticket, doubled(ticket))
    stage.model_queue.deliver([ticket], [None])
    assert stage.y("b") == [2.0] * 4
    stage.send("c")
    assert stage.y("c") == [2.0] * 4


# ---------------------------------------------------------------------------
# The end
# ---------------------------------------------------------------------------


@staged
async def test_a_draining_queue_refuses_hits_and_executes_waiting_followers() -> None:
    stage = CachedStage()
    stage.send("kept", 9.0)
    await stage.execute()
    for name in "abc":
        stage.send(name)
    draining = asyncio.ensure_future(stage.model_queue.drain())
    await stage.settle()
    with pytest.raises(Unavailable, match="Server is stopping"):
        stage.send("hit", 9.0)
    stage.tickets["a"].cancel()
    assert not draining.done()
    assert await stage.execute() == ["b"]
    await draining
    assert stage.y("c") == [2.0] * 4


@pytest.mark.parametrize("end", ["close", "abandon"])
def test_request_that_waits_when_the_queue_closes_is_answered_once(end: str) -> None:
    @staged
    async def scene() -> None:
        stage = CachedStage()
        for name in "abc":
            stage.send(name)
        getattr(stage.model_queue, end)()
        for name in "abc":
            assert [type(answer) for answer in stage.answers[name]] == [Unavailable]
        assert (stage.model_queue.in_flight, stage.model_queue.pending) == (0, 0)

    scene()


# ---------------------------------------------------------------------------
# Large tensors
# ---------------------------------------------------------------------------

MANY = LARGE_BYTES // 4 + 1


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


@staged
async def test_large_request_is_digested_and_copied_by_a_thread_and_cached() -> None:
    stage = CachedStage(size=1 << 24)
    stage.send("a", floats=MANY)
    assert (stage.model_queue.pending, stage.model_queue.in_flight) == (0, 1)
    await until(lambda: stage.model_queue.pending)
    stage.send("b", floats=MANY)  # only now: which of two threads is done first is chance
    await until(lambda: any(flight.followers for flight in stage.model_queue._flights.values()))
    assert (stage.model_queue.pending, stage.model_queue.in_flight) == (1, 2)
    assert await stage.execute() == ["a"]
    await until(lambda: stage.answers["b"])
    assert stage.y("b")[:2] == [2.0, 2.0]
    await until(lambda: len(stage.local))
    stage.send("c", floats=MANY)
    await until(lambda: stage.answers["c"])
    assert stage.counts() == (2, 1)
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(stage.response("b").outputs["y"])[:] = 0
    stage.off_loop_work.close()


@staged
async def test_a_request_cancelled_before_it_is_digested_is_not_executed() -> None:
    stage = CachedStage()
    stage.send("a", floats=MANY).cancel()
    assert isinstance(stage.answers["a"][0], Cancelled)
    stage.send("b", 2.0, floats=MANY)
    await until(lambda: stage.model_queue.pending)
    assert await stage.execute() == ["b"]
    assert len(stage.answers["a"]) == 1
    stage.off_loop_work.close()


@staged
async def test_a_response_too_large_for_the_cache_is_not_copied_and_its_followers_get_it() -> None:
    stage = CachedStage(size=1000)
    stage.send("a", floats=400)
    stage.send("b", floats=400)
    await stage.execute()
    assert stage.y("b") == [2.0] * 400
    assert np.shares_memory(np.asarray(stage.response("a").outputs["y"]), np.asarray(stage.response("b").outputs["y"]))
    stage.send("c", floats=400)
    assert await stage.execute() == ["c"]
    assert (len(stage.local), stage.local.used_bytes) == (0, 0)


# ---------------------------------------------------------------------------
# A cache that fails
# ---------------------------------------------------------------------------


class Broken(ResponseCache):
    name = "broken"

    def get(self, key: bytes) -> CachedResponse | None:
        raise ValueError("cannot look")

    def put(self, key: bytes, response: CachedResponse) -> None:
        raise OSError("cannot keep")


@staged
async def test_a_cache_that_raises_is_counted_and_the_model_answers() -> None:
    stage = CachedStage(cache=Broken(None))
    stage.send("a")
    stage.send("b")
    assert await stage.execute() == ["a"]
    assert stage.y("a") == stage.y("b") == [2.0] * 4
    assert stage.statistics.snapshot().cache_failures == 2


def test_answers_keep_the_order_of_their_requests_where_the_model_preserves_it() -> None:
    """The answer of the first is that of the second, too: and the second gets it later."""

    async def scene() -> None:
        stage = CachedStage("dynamic_batching { preserve_ordering: true }", kind=DynamicScheduler)
        order: list[str] = []

        def respond(answer: Answer, final: bool) -> None:
            assert isinstance(answer, InferResponse)
            order.append(answer.id)

        for name in ("first", "second"):
            stage.model_queue.submit(make_ticket("m", {"x": np.ones((1, 4), np.float32)}, respond, id=name))
        assert await stage.execute() == ["first"]
        assert order == ["first", "second"]

    asyncio.run(scene())
