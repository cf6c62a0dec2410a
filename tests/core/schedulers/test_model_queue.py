"""The work of the model queue for any scheduler. The test plays the instances, and moves the clock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.backends.base import Device, Instance, Tensors
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import BackendError, Cancelled, Code, HeadraceError, InternalError, Unavailable
from headrace.executors.instance import runner_for
from headrace.executors.instance_thread import InstanceThread
from headrace.executors.output_schema import OutputSchema
from headrace.executors.threads import LoopWakeup, Wakeup
from headrace.messages import dtypes
from headrace.messages.response import Answer, InferResponse
from headrace.messages.spec import Spec
from headrace.messages.ticket import Batch, Padding, Ticket
from headrace.schedulers.base import FullScheduler, InstanceInfo, ScheduledModel, Scheduler, SchedulerContext, Wait
from headrace.schedulers.dynamic import DirectScheduler, DynamicScheduler
from headrace.schedulers.model_queue import ModelQueue
from headrace.telemetry.statistics import ModelStatistics
from headrace_testing.simulated_parts import ManualClock
from tests.core.conftest import make_ticket

MS = 1_000_000
X = Spec("x", dtypes.FP32, (1,))
STATE = Spec("state", dtypes.FP32, (1,))


class First(FullScheduler):
    """One request after the other."""

    name = "first"

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        return self.context.waiting.head(1)


class Stage:
    """A model queue with instances that the test plays, and the answers of the callers."""

    def __init__(self, kind: type[Scheduler], instances: int = 1, **model: Any) -> None:
        self.clock, self.statistics = ManualClock(), ModelStatistics()
        self.config = ModelConfig(name="m", max_batch_size=4)
        infos = [InstanceInfo(f"m_0_{number}", Device("cpu"), 4) for number in range(instances)]
        scheduled = ScheduledModel(self.config, infos, {"x": X}, {"x": X}, **model)
        self.model_queue = ModelQueue(kind, scheduled, self.statistics, asyncio.get_running_loop(), self.clock)
        self.answers: dict[str, list[Answer]] = {}
        self.polled: list[tuple[str, list[str]]] = []
        self.batches: list[list[Ticket]] = []
        self._wakeups: dict[str, LoopWakeup] = {}

    def send(self, name: str, rows: int = 1, **fields: Any) -> Ticket:
        def respond(answer: Answer, final: bool) -> None:
            self.answers.setdefault(name, []).append(answer)

        ticket = make_ticket("m", {"x": np.ones((rows, 1), np.float32)}, respond, id=name, rows=rows, **fields)
        self.model_queue.submit(ticket)
        return ticket

    def serve(self, number: int = 0) -> None:
        """Let an instance poll whenever it is woken. It keeps its batch until `finish`."""
        source = self.model_queue.sources[number]

        def pull() -> None:
            if batch := source.poll(wakeup):
                self.batches.append(batch)
                self.polled.append((source.instance.name, [ticket.request.id for ticket in batch]))

        wakeup = LoopWakeup(pull)
        pull()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def finish(self, number: int = 0, outputs: dict[str, Any] | None = None) -> None:
        batch = self.batches.pop(0)
        self.model_queue.sources[number].deliver(batch, [InferResponse(outputs or {}, id=t.request.id) for t in batch])
        self.serve(number)


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), 20))

    run.__name__ = test.__name__
    return run


def threaded(model_queue: ModelQueue, number: int, instance: Instance, outputs: dict[str, Spec]) -> InstanceThread:
    schema = OutputSchema("m", "1", outputs, True)
    name = model_queue.sources[number].instance.name
    return InstanceThread(name, lambda: (instance, runner_for(instance, schema)), model_queue.statistics.for_instance)


@on_loop
async def test_a_scheduler_of_one_method_serves_and_is_not_notified_of_cancellations() -> None:
    stage = Stage(First)
    cancelled = stage.send("gone")
    stage.send("a")
    cancelled.cancel()
    stage.serve()
    assert stage.polled == [("m_0_0", ["a"])]
    stage.finish()
    assert isinstance(stage.answers["a"][0], InferResponse)
    assert isinstance(stage.answers["gone"][0], Cancelled)
    assert (stage.model_queue.in_flight, stage.model_queue.pending) == (0, 0)
    assert stage.statistics.cancelled.count == 1


@on_loop
async def test_an_idle_instance_is_asked_for_once_per_turn_of_the_loop() -> None:
    polls = 0

    class Counting(First):
        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            nonlocal polls
            polls += 1
            return self.context.waiting.head(4)

    stage = Stage(Counting)
    stage.serve()
    for name in "abc":
        stage.send(name)
    await stage.settle()
    assert stage.polled == [("m_0_0", ["a", "b", "c"])]
    assert polls == 2


class Patient(First):
    """Waits 5 ms for four rows."""

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        waiting = self.context.waiting.head(4)
        if not waiting or len(waiting) == 4:
            return waiting
        left_ns = waiting[0].queued_ns + 5 * MS - now_ns
        return Wait(left_ns, 4 - len(waiting)) if left_ns > 0 else waiting


@on_loop
async def test_a_wait_ends_by_the_clock() -> None:
    stage = Stage(Patient)
    stage.serve()
    stage.send("a")
    await stage.settle()
    stage.clock.advance(5 * MS - 1)
    assert not stage.polled
    stage.clock.advance(1)
    assert stage.polled == [("m_0_0", ["a"])]


@on_loop
async def test_a_wait_ends_when_as_many_rows_have_arrived_and_not_before() -> None:
    lengths: list[int] = []

    class Counting(Patient):
        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            lengths.append(len(self.context.waiting))
            return super().next(instance, now_ns)

    stage = Stage(Counting)
    stage.serve()
    for name in "abcd":
        stage.send(name)
        await stage.settle()
    assert stage.polled == [("m_0_0", ["a", "b", "c", "d"])]
    assert lengths == [0, 1, 4]
    assert stage.clock.pending == 0


@on_loop
async def test_scheduler_gets_the_instance_that_polls() -> None:
    class Pinned(Scheduler):
        name = "pinned"

        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            return [t for t in self.context.waiting if t.request.id == instance.name][:1]

    stage = Stage(Pinned, 2)
    stage.serve(0)
    stage.serve(1)
    stage.send("m_0_1")
    await stage.settle()
    assert stage.polled == [("m_0_1", ["m_0_1"])]
    stage.send("m_0_0")
    await stage.settle()
    assert stage.polled[1] == ("m_0_0", ["m_0_0"])


@on_loop
async def test_an_instance_that_waits_for_more_keeps_nothing_from_one_that_is_different() -> None:
    polled: list[str] = []

    class Different(Scheduler):
        """The first instance waits for four requests; the others run quick ones."""

        name = "different"

        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            polled.append(instance.name)
            if instance.name == "m_0_0":
                waiting = self.context.waiting.head(4)
                return waiting if len(waiting) == 4 else Wait(5 * MS, 4 - len(waiting))
            return [ticket for ticket in self.context.waiting if ticket.request.id == "quick"]

    stage = Stage(Different, 2)
    stage.send("a")
    stage.serve(0)
    stage.serve(1)
    stage.send("quick")
    await stage.settle()
    assert stage.polled == [("m_0_1", ["quick"])]
    assert polled.count("m_0_0") == 1


class Gated(Wakeup):
    """A thread that is rung for, and not awake until `open`."""

    def __init__(self) -> None:
        super().__init__()
        self.rung, self.open = threading.Event(), threading.Event()

    def wait(self) -> None:
        super().wait()
        self.rung.set()
        self.open.wait()


async def take_on_threads(model_queue: ModelQueue, wakeups: Sequence[Wakeup]) -> list[asyncio.Future[list[str]]]:
    """Threads that take one batch each, and are idle now."""

    def take(number: int) -> list[str]:
        return [ticket.request.id for ticket in model_queue.sources[number].take(wakeups[number]) or ()]

    numbers = range(len(wakeups))
    taken: list[asyncio.Future[list[str]]] = [asyncio.ensure_future(asyncio.to_thread(take, n)) for n in numbers]
    while len(model_queue.idle) < len(taken):
        await asyncio.sleep(0)
    return taken


@on_loop
async def test_without_a_wait_a_thread_takes_all_requests_that_arrive_until_it_is_awake() -> None:
    stage, wakeup = Stage(DynamicScheduler), Gated()
    (taken,) = await take_on_threads(stage.model_queue, [wakeup])
    stage.send("a")
    await asyncio.to_thread(wakeup.rung.wait)
    assert stage.model_queue.pending == 1
    stage.send("b")
    wakeup.open.set()
    assert await taken == ["a", "b"]


@on_loop
async def test_a_thread_hands_remaining_requests_on_to_the_next() -> None:
    stage, wakeups = Stage(DirectScheduler, 2), [Gated(), Gated()]
    taken = await take_on_threads(stage.model_queue, wakeups)
    stage.send("a")
    stage.send("b")
    first, second = wakeups
    await asyncio.to_thread(first.rung.wait)
    await stage.settle()
    assert not second.rung.is_set()
    first.open.set()
    second.open.set()
    assert [await each for each in taken] == [["a"], ["b"]]


@on_loop
async def test_once_something_has_waited_for_more_the_loop_claims_for_threads() -> None:
    class Waited(Patient):
        on_threads = instances_alike = True

    stage, wakeup = Stage(Waited), Gated()
    (taken,) = await take_on_threads(stage.model_queue, [wakeup])
    stage.send("a")
    wakeup.open.set()
    while stage.model_queue.threads_take:
        await asyncio.sleep(0)
    while not stage.clock.pending:
        await asyncio.sleep(0)
    stage.clock.advance(5 * MS)
    assert stage.model_queue.pending == 0
    assert await taken == ["a"]


@on_loop
async def test_levels_are_served_in_order_and_a_deadline_is_kept_by_the_clock() -> None:
    class Levels(First):
        def submit(self, ticket: Ticket) -> int:
            if ticket.request.timeout_us:
                ticket.deadline_ns = ticket.queued_ns + ticket.request.timeout_us * 1000
            return ticket.request.priority

        def expired(self, ticket: Ticket) -> int | None:
            return 3 if ticket.request.id == "late" else None

    stage = Stage(Levels)
    stage.send("second", priority=2)
    stage.send("late", priority=1, timeout_us=1000)
    stage.send("dead", priority=1, timeout_us=1000)
    stage.send("first", priority=1)
    stage.clock.advance(MS)
    (refusal,) = stage.answers["dead"]
    assert isinstance(refusal, HeadraceError)
    assert (refusal.message, refusal.code) == ("Request timeout expired", Code.UNAVAILABLE)
    assert [ticket.request.id for ticket in stage.model_queue.queue] == ["first", "second", "late"]


@on_loop
async def test_scheduler_answers_the_requests_that_it_does_not_queue() -> None:
    owned: list[Ticket] = []
    heard: list[tuple[str, InstanceInfo | None]] = []

    class Forwarding(Scheduler):
        name = "forwarding"

        def submit(self, ticket: Ticket) -> int:
            def respond(answer: Answer, final: bool) -> None:
                self.context.answer(ticket, answer, final)

            self.context.call(make_ticket("other", dict(ticket.request.inputs), respond))
            return 0

        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            raise AssertionError("there are no instances")

        def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
            heard.extend((ticket.request.id, instance) for ticket in tickets)

    stage = Stage(Forwarding, 0, call=owned.append)
    stage.send("a")
    cancelled = stage.send("gone")
    assert (stage.model_queue.in_flight, stage.model_queue.pending) == (2, 0)
    cancelled.cancel()
    cancelled.cancel()
    assert heard == [("gone", None)]
    draining = asyncio.ensure_future(stage.model_queue.drain())
    await stage.settle()
    assert not draining.done()
    for ticket in owned:
        ticket.respond(InferResponse({}, id="done"), True)
        ticket.respond(InferResponse({}, id="again"), True)
    await draining
    (answer,) = stage.answers["a"]
    assert isinstance(answer, InferResponse)
    assert answer.id == "done"
    assert [type(answer) for answer in stage.answers["gone"]] == [Cancelled]
    snapshot = stage.statistics.snapshot()
    assert (snapshot.success.count, snapshot.cancelled.count) == (1, 1)


@on_loop
async def test_abandoning_answers_the_requests_that_a_scheduler_owns() -> None:
    class Hoarding(First):
        def submit(self, ticket: Ticket) -> int:
            return 0

    stage = Stage(Hoarding)
    ticket = stage.send("a")
    stage.model_queue.abandon()
    assert isinstance(stage.answers["a"][0], Unavailable)
    assert ticket.cancelled
    await stage.model_queue.drain()
    stage.model_queue.scheduler.context.answer(ticket, InferResponse({}), True)
    assert len(stage.answers["a"]) == 1


class Stateful(First):
    """Gives each batch what the one before it has left in ``state``, padded to four rows."""

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        self.kept = {"state": STATE}
        self.state: dict[str, Any] = {}

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        tickets = self.context.waiting.head(2)
        if not tickets:
            return ()
        zero = np.zeros((1, 1), np.float32)
        padding = [Padding("m", {"x": zero}) for _ in range(4 - len(tickets))]
        added = [{"state": self.state.get(ticket.request.id, zero)} for ticket in tickets] + [{"state": zero}] * len(
            padding
        )
        return Batch([*tickets, *padding], added, pinned=True)

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        for ticket, answer in zip(tickets, answers, strict=True):
            if isinstance(answer, InferResponse) and not isinstance(ticket, Padding):
                self.state[ticket.request.id] = answer.outputs["state"]


class Sums(Instance):
    """Adds ``x`` to ``state``; fails where a row of ``x`` is negative."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def execute(self, inputs: Tensors) -> Tensors:
        x = np.asarray(inputs["x"])
        self.rows.append(len(x))
        if (x < 0).any():
            raise BackendError("negative")
        total = x + np.asarray(inputs.get("state", 0))
        return {"x": total * 10, "state": total}


def test_a_batch_has_added_inputs_padding_and_hidden_outputs() -> None:
    @on_loop
    async def scenario() -> None:
        stage, sums = Stage(Stateful), Sums()
        thread = threaded(stage.model_queue, 0, sums, {"x": X, "state": STATE})
        await asyncio.to_thread(thread.load)
        thread.serve(stage.model_queue.sources[0], asyncio.get_running_loop())
        for turn in (1, 2):
            for name, outputs in (("a", ()), ("b", ("x",))):
                stage.send(name, outputs=outputs)
                while len(stage.answers.get(name, ())) < turn:
                    await asyncio.sleep(0)
        for name in "ab":
            parts = [answer.outputs for answer in stage.answers[name] if isinstance(answer, InferResponse)]
            assert [list(outputs) for outputs in parts] == [["x"], ["x"]]
            assert [float(np.asarray(outputs["x"])[0, 0]) for outputs in parts] == [10, 20]
        assert set(sums.rows) == {4}
        snapshot = stage.statistics.snapshot()
        assert (snapshot.success.count, snapshot.executions.inference_count) == (4, 4)
        stage.model_queue.close()
        await asyncio.to_thread(thread.join)

    scenario()


def test_a_pinned_batch_that_fails_is_not_tried_one_by_one() -> None:
    @on_loop
    async def scenario() -> None:
        stage, sums = Stage(Stateful), Sums()
        thread = threaded(stage.model_queue, 0, sums, {"x": X, "state": STATE})
        await asyncio.to_thread(thread.load)
        bad = stage.send("bad")
        bad.request = bad.request.with_inputs({"x": -np.ones((1, 1), np.float32)})
        stage.send("good")
        thread.serve(stage.model_queue.sources[0], asyncio.get_running_loop())
        while len(stage.answers) < 2:
            await asyncio.sleep(0)
        assert [str(stage.answers[name][0]) for name in ("bad", "good")] == ["negative", "negative"]
        assert sums.rows == [4]
        stage.model_queue.close()
        await asyncio.to_thread(thread.join)

    scenario()


@on_loop
async def test_a_submit_that_raises_changes_nothing() -> None:
    class Broken(First):
        error: BaseException = Unavailable("full")

        def submit(self, ticket: Ticket) -> int:
            raise self.error

    stage = Stage(Broken)
    with pytest.raises(Unavailable, match="full"):
        stage.send("a")
    Broken.error = SystemExit("stray")
    with pytest.raises(InternalError, match="SystemExit: stray"):
        stage.send("b")
    assert (stage.model_queue.in_flight, stage.model_queue.pending, stage.statistics.rejected.count) == (0, 0, 1)
    await stage.model_queue.drain()


def test_a_scheduler_that_raises_on_the_loop_is_asked_again_a_second_later(caplog: pytest.LogCaptureFixture) -> None:
    class Stumbling(First):
        failures = 1

        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            if self.context.waiting and self.failures:
                self.failures -= 1
                raise SystemExit("stray")
            return super().next(instance, now_ns)

    @on_loop
    async def scenario() -> None:
        stage = Stage(Stumbling)
        instance = Sums()
        thread = threaded(stage.model_queue, 0, instance, {"x": X})
        await asyncio.to_thread(thread.load)
        thread.serve(stage.model_queue.sources[0], asyncio.get_running_loop())
        while not stage.model_queue.idle:
            await asyncio.sleep(0)
        stage.send("a")
        while "raised an exception in next()" not in caplog.text:
            await asyncio.sleep(0)
        assert "a" not in stage.answers
        stage.clock.advance(1000 * MS)
        while "a" not in stage.answers:
            await asyncio.sleep(0)
        stage.model_queue.close()
        await asyncio.to_thread(thread.join)

    scenario()


@on_loop
async def test_a_finished_or_expired_that_raises_keeps_no_answer_back() -> None:
    class Deaf(First):
        def submit(self, ticket: Ticket) -> None:
            ticket.deadline_ns = ticket.queued_ns + MS

        def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
            raise SystemExit("stray")

        def expired(self, ticket: Ticket) -> int | None:
            raise SystemExit("stray")

    stage = Stage(Deaf)
    stage.send("a")
    stage.serve()
    stage.finish()
    assert isinstance(stage.answers["a"][0], InferResponse)
    stage.model_queue.sources[0].stop_polling(LoopWakeup(lambda: None))
    stage.send("b")
    stage.clock.advance(MS)
    assert isinstance(stage.answers["b"][0], Unavailable)


@on_loop
async def test_a_scheduler_that_returns_a_request_that_does_not_wait_is_stopped() -> None:
    class Twice(First):
        first: tuple[Ticket, ...] = ()

        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            self.first = self.first or self.context.waiting.head(1)
            return self.first

    stage = Stage(Twice, 2)
    stage.send("a")
    stage.serve(0)
    with pytest.raises(InternalError, match="scheduler 'first' returned requests that do not wait"):
        stage.serve(1)


def test_a_thread_gets_batches_from_a_scheduler_that_is_asked_on_the_loop_only() -> None:
    threads: set[int] = set()

    class Here(First):
        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            threads.add(threading.get_ident())
            return self.context.waiting.head(2)

    class Echo(Instance):
        def execute(self, inputs: Tensors) -> Tensors:
            return inputs

    @on_loop
    async def scenario() -> None:
        stage = Stage(Here, 2)
        hosts = [threaded(stage.model_queue, number, Echo(), {"x": X}) for number in range(2)]
        for number, host in enumerate(hosts):
            await asyncio.to_thread(host.load)
            host.serve(stage.model_queue.sources[number], asyncio.get_running_loop())
        for name in range(40):
            stage.send(str(name))
            if name % 3 == 0:
                await asyncio.sleep(0)
        await stage.model_queue.drain()
        assert all(isinstance(answers[0], InferResponse) for answers in stage.answers.values())
        assert len(stage.answers) == 40
        assert threads == {threading.get_ident()}
        stage.model_queue.close()
        for host in hosts:
            await asyncio.to_thread(host.join)

    scenario()


class Counted(DynamicScheduler):
    """Counts its calls."""

    name = "counted"
    calls = 0

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        self.calls += 1
        return super().next(instance, now_ns)


@on_loop
async def test_a_scheduler_for_threads_is_not_polled_while_nothing_waits() -> None:
    stage = Stage(Counted)
    assert isinstance(stage.model_queue.scheduler, Counted)
    (source,) = stage.model_queue.sources
    ran: list[str] = []

    def run(batch: list[Ticket]) -> int:
        ran.extend(ticket.request.id for ticket in batch)
        return stage.clock.now_ns()

    source.run_on_loop(run)
    assert source.poll(LoopWakeup(lambda: None)) == []
    for _ in range(3):
        stage.send("a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert ran == ["a"] * 3
    assert stage.model_queue.scheduler.calls == 3


class ReleasingScheduler(DynamicScheduler):
    """Releases instances, and reports it itself."""

    name = "asked"

    def lets_go(self, instance: InstanceInfo) -> bool:
        return True


@on_loop
async def test_a_source_that_is_dismissed_while_nothing_waits_is_removed() -> None:
    stage = Stage(ReleasingScheduler)
    stage.serve()
    await asyncio.wait_for(stage.model_queue.dismiss(stage.model_queue.sources[0]), 5)


class Timed(DynamicScheduler):
    """Gives each request 1 ms."""

    name = "timed"

    def submit(self, ticket: Ticket) -> int | None:
        ticket.deadline_ns = ticket.queued_ns + MS
        return 1


@on_loop
async def test_an_expired_lone_request_is_answered_by_its_timer() -> None:
    stage = Stage(Timed)
    ticket, (instance,) = stage.send("a"), stage.model_queue.instances
    before, after = ticket.deadline_ns - 1, ticket.deadline_ns
    assert stage.model_queue.scheduler.next(instance, after) == []
    assert stage.model_queue.scheduler.next(instance, before) == [ticket]
