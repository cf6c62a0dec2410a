"""A scheduler on a stage: the real model queue, a clock that stands still, and instances that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import numpy as np
from google.protobuf import text_format

from headrace import (
    Answer,
    Batch,
    Cancelled,
    Device,
    FullScheduler,
    HeadraceError,
    InferRequest,
    InferResponse,
    InstanceInfo,
    ModelConfig,
    OtherModel,
    Padding,
    Scheduler,
    SchedulerHarness,
    Spec,
    Ticket,
    Unavailable,
    Wait,
    Waiting,
    dtypes,
)
from headrace_testing.example import NAME
from headrace_testing.played import DoublingInstance, PlayedInstance, TurnedClock

#: Only ends what hangs.
HANGING_S = 90
#: The config of the models that a scheduler calls.
OTHER = """backend: "identity" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }"""
_X = Spec("x", dtypes.FP32, (1,))
_Y = Spec("y", dtypes.FP32, (1,))


def play(scene: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``scene`` on an event loop of its own."""
    asyncio.run(asyncio.wait_for(scene(), HANGING_S))


class Stage:
    """The model queue with a scheduler of class ``kind``.

    - ``answers``: the answers of each caller, by the id of its request.
    - ``wrong``: what no scheduler may do: exceptions, and batches that fit no instance.
    - ``asked``: the number of calls of `next`.
    - ``calls``: its requests to other models, which answer ``x`` as ``y``.
    """

    def __init__(self, kind: type[Scheduler], config: ModelConfig, instances: int, most_rows: int = 0) -> None:
        self.clock = TurnedClock()
        self.answers: dict[str, list[Answer]] = {}
        self.tickets: list[Ticket] = []
        #: The rows of each request as sent, by id.
        self.rows: dict[str, int] = {}
        self.wrong: list[str] = []
        self.asked = 0
        #: The maximum rows of one request; 0 for no limit.
        self._most_rows = most_rows
        self.calls: list[Ticket] = []
        self.has_threads = False
        slots = max(1, config.max_batch_size)
        infos = [InstanceInfo(f"{NAME}_0_{number}", Device("cpu"), slots) for number in range(instances)]
        needed = kind.depends_on(config) if issubclass(kind, FullScheduler) else ()
        others = {
            each: OtherModel(
                text_format.Parse(OTHER, ModelConfig(name=each.model)), 1, {"x": _X}, {"y": _Y}, {}, self._call
            )
            for each in needed
        }
        self._harness = SchedulerHarness(
            _observed(kind, self), config, infos, {"x": _X}, {"y": _Y}, self.clock, self._call, others
        )
        self.model_queue, self.statistics = self._harness.model_queue, self._harness.statistics
        self.instances = [PlayedInstance(source, self.wrong) for source in self.model_queue.sources]

    # ------------------------------------------------------------------ the callers

    def send(self, rows: int = 1, key: object = None, **fields: Any) -> Ticket:
        """Send a request of ``rows`` rows. It stacks only with requests of the same ``key``. Raises what `submit`
        raises."""
        rows = min(rows, self._most_rows or rows)
        name = str(len(self.tickets))
        heard = self.answers[name] = []
        request = InferRequest(NAME, {"x": np.ones((rows, 1), np.float32)}, id=name, **fields)
        ticket = Ticket(request, partial(_hear, heard))
        ticket.rows, ticket.batch_key, ticket.arrival_ns = rows, key, self.clock.now_ns()
        self.tickets.append(ticket)
        self.rows[name] = rows
        self.model_queue.submit(ticket)
        return ticket

    def told(self, ticket: Ticket) -> list[Answer]:
        """Return the answers of the caller of ``ticket`` so far."""
        return self.answers[ticket.request.id]

    # ------------------------------------------------------------------ other models

    def _call(self, ticket: Ticket) -> None:
        self.calls.append(ticket)
        ticket.on_cancel = self._leave

    def _leave(self, call: Ticket) -> None:
        if call in self.calls:
            self.calls.remove(call)
            self._respond(call, Cancelled("request was cancelled"))

    def answer_calls(self, error: Answer = None) -> bool:
        """Answer the calls of other models, all with ``error`` if given. Return True if there were any."""
        calls, self.calls = self.calls, []
        for call in calls:
            x: Any = call.request.inputs["x"]
            self._respond(call, error or InferResponse({"y": x}, id=call.request.id))
        return bool(calls)

    def _respond(self, call: Ticket, answer: Answer) -> None:
        try:
            call.respond(answer, True)
        except Exception as error:
            self.wrong.append(f"hearing what another model answers raised {error!r}")

    # ------------------------------------------------------------------ instances that come and go

    def enter(self) -> PlayedInstance:
        """Add an instance, which asks at once."""
        slots = self.model_queue.instances[0].slots
        info = InstanceInfo(f"{NAME}_0_{len(self.instances)}", Device("cpu"), slots)
        (source,) = self.model_queue.replace_instances([info], [])
        self.instances.append(PlayedInstance(source, self.wrong))
        self.instances[-1].ask()
        return self.instances[-1]

    def dismiss(self, instance: PlayedInstance) -> asyncio.Future[None]:
        """Remove ``instance``. The future is done when it has run all that it was given or that is bound to it."""
        (source,) = [source for source in self.model_queue.sources if source is instance.source]
        self.model_queue.replace_instances([], [source])
        return asyncio.ensure_future(self.model_queue.dismiss(source))

    # ------------------------------------------------------------------ time

    def begin(self) -> None:
        """Let every instance ask for the first time."""
        for instance in self.instances:
            instance.ask()

    async def settle(self, turns: int = 5) -> None:
        """Let the event loop do what is due."""
        for _ in range(turns):
            await asyncio.sleep(0)

    async def turn(self, by_ns: int) -> None:
        await self.settle()
        self.clock.turn(by_ns)
        await self.settle()

    async def run(self, patience_ns: int) -> None:
        """Finish batches and answer calls; if there are none, move the time. Stop when every request is answered.

        Fails when nothing more would change, or when ``patience_ns`` has passed.
        """
        end_ns = self.clock.now_ns() + patience_ns
        await self.settle()
        while self.model_queue.in_flight:
            busy = [instance for instance in self.instances if instance.batch]
            for instance in busy:
                instance.finish()
            if not (self.answer_calls() or busy):
                next_ns = self.clock.next_ns
                if next_ns is None or next_ns > end_ns:
                    self.check()
                    waits = [ticket.request.id for ticket in self.tickets if not self.told(ticket)]
                    when = "nothing will ever wake it" if next_ns is None else f"{patience_ns / 1e6:g} ms have passed"
                    raise AssertionError(f"every instance is idle and {when}, but requests {waits} still wait")
                self.clock.turn(next_ns - self.clock.now_ns())
            await self.settle()

    # ------------------------------------------------------------------ threads

    async def start_threads(self) -> None:
        """Replace the played instances by real threads."""
        self.has_threads = True
        outputs = {"y": _Y, **self.model_queue.full_scheduler.kept}
        await self._harness.start_threads(lambda: DoublingInstance(outputs))

    async def end_threads(self) -> None:
        """Move the time until every request is answered, then join the threads."""
        while self.model_queue.in_flight:
            self.clock.turn(1_000_000)
            await asyncio.sleep(0)
        self.model_queue.close()
        await self._harness.join_threads()

    # ------------------------------------------------------------------ what it watches

    def check(self) -> None:
        """Fail if anything was wrong."""
        assert not self.wrong, self.wrong[0]

    def note(self, instance: InstanceInfo, chosen: Sequence[Ticket] | Wait, waiting: Waiting) -> None:
        """Check the batch that the scheduler returned for ``instance``."""
        self.asked += 1
        if isinstance(chosen, Wait):
            if chosen.delay_ns <= 0 or chosen.rows < 1:
                self.wrong.append(f"instance '{instance.name}' is to wait for {chosen}, which is over at once")
        elif chosen:
            what = f"the batch {[ticket.request.id for ticket in chosen]} of '{instance.name}'"
            self.wrong += [f"{what} {why}" for why in _misfits(instance, chosen, waiting, self.has_threads)]


def _misfits(instance: InstanceInfo, chosen: Sequence[Ticket], waiting: Waiting, has_threads: bool) -> Sequence[str]:
    callers = [ticket for ticket in chosen if not isinstance(ticket, Padding)]
    rows, why = sum(ticket.rows for ticket in chosen), []
    if rows > instance.slots:
        why.append(f"has {rows} rows, and the instance has {instance.slots} slots")
    if not callers:
        why.append("is nothing but padding")
    if len(set(callers)) < len(callers):
        why.append("has a request twice")
    if len({ticket.batch_key for ticket in callers}) > 1:
        why.append("joins requests that do not stack: their batch_key differs")
    if isinstance(chosen, Batch) and len(chosen.added) not in (0, len(chosen)):
        why.append(f"adds inputs to {len(chosen.added)} requests, and has {len(chosen)}")
    reason, told = getattr(chosen, "reason", ""), getattr(chosen, "rows", 0)  # of a `Batch`, and of similar classes
    wanted = sum(ticket.rows for ticket in callers)
    if not isinstance(reason, str):
        why.append(f"has the reason {reason!r}, which is no text")
    if told not in (0, wanted):
        why.append(f"is said to have {told} rows, and its requests have {wanted}")
    if not has_threads and any(ticket not in waiting for ticket in callers):
        why.append("has a request that does not wait")
    return why


def _observed(kind: type[Scheduler], stage: Stage) -> type[Scheduler]:
    """Return ``kind`` with every result and exception recorded by ``stage``."""

    class Observed(kind):  # type: ignore[misc, valid-type]
        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            chosen: Sequence[Ticket] | Wait = heard(super().next)(instance, now_ns)
            stage.note(instance, chosen, self.context.waiting)
            return chosen

    def heard(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except HeadraceError as error:
                is_refusal = isinstance(error, Unavailable) and method.__name__ == "submit"
                if not (is_refusal or method.__name__ == "rescheduled"):
                    stage.wrong.append(f"{method.__name__} raised {error!r}")
                raise
            except BaseException as error:
                stage.wrong.append(f"{method.__name__} raised {error!r}")
                raise

        return call

    for name in ("submit", "rescheduled", "finished", "expired"):
        method = getattr(kind, name, None)
        # the model queue does less for a scheduler that overrides less
        if method not in (None, getattr(FullScheduler, name)):
            setattr(Observed, name, _passed_on(method, heard))
    return Observed


def _passed_on(method: Callable[..., Any], heard: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    return lambda self, *arguments: heard(method)(self, *arguments)


def _hear(heard: list[Answer], answer: Answer, final: bool) -> None:
    heard.append(answer)
