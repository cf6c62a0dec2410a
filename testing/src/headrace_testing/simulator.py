"""Simulates the surroundings of a scheduler: the real model queue, with a manual clock and simulated instances."""

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
from headrace_testing.simulated_parts import DoublingInstance, ManualClock, SimulatedInstance

#: The timeout of a scenario that hangs.
_TIMEOUT_S = 90
#: The config of the models that a scheduler calls.
OTHER = """backend: "identity" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }"""
_X = Spec("x", dtypes.FP32, (1,))
_Y = Spec("y", dtypes.FP32, (1,))


def run_scenario(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``scenario`` on an event loop of its own."""
    asyncio.run(asyncio.wait_for(scenario(), _TIMEOUT_S))


class SchedulerSimulator:
    """The model queue with a scheduler of class ``kind``.

    - ``answers``: the answers to each request, by its id.
    - ``violations``: what no scheduler may do: exceptions, and batches that fit no instance.
    - ``next_calls``: the number of calls of `next`.
    - ``calls``: its requests to other models, which return ``x`` as ``y``.
    """

    def __init__(self, kind: type[Scheduler], config: ModelConfig, instances: int, most_rows: int = 0) -> None:
        self.clock = ManualClock()
        self.answers: dict[str, list[Answer]] = {}
        self.tickets: list[Ticket] = []
        #: The rows of each request as sent, by id.
        self.rows: dict[str, int] = {}
        self.violations: list[str] = []
        self.next_calls = 0
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
        self.instances = [SimulatedInstance(source, self.violations) for source in self.model_queue.sources]

    # ------------------------------------------------------------------ the callers

    def send(self, rows: int = 1, key: object = None, **fields: Any) -> Ticket:
        """Send a request of ``rows`` rows. It stacks only with requests of the same ``key``.

        Raises the errors of `submit`.
        """
        rows = min(rows, self._most_rows or rows)
        name = str(len(self.tickets))
        answers = self.answers[name] = []
        request = InferRequest(NAME, {"x": np.ones((rows, 1), np.float32)}, id=name, **fields)
        ticket = Ticket(request, partial(_append, answers))
        ticket.rows, ticket.batch_key, ticket.arrival_ns = rows, key, self.clock.now_ns()
        self.tickets.append(ticket)
        self.rows[name] = rows
        self.model_queue.submit(ticket)
        return ticket

    def answers_to(self, ticket: Ticket) -> list[Answer]:
        """Return the answers to ``ticket`` so far."""
        return self.answers[ticket.request.id]

    # ------------------------------------------------------------------ other models

    def _call(self, ticket: Ticket) -> None:
        self.calls.append(ticket)
        ticket.on_cancel = self._cancel_call

    def _cancel_call(self, call: Ticket) -> None:
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
            self.violations.append(f"the callback for the answer of another model raised {error!r}")

    # ------------------------------------------------------------------ instances

    def add_instance(self) -> SimulatedInstance:
        """Add an instance, which polls at once."""
        slots = self.model_queue.instances[0].slots
        info = InstanceInfo(f"{NAME}_0_{len(self.instances)}", Device("cpu"), slots)
        (source,) = self.model_queue.replace_instances([info], [])
        self.instances.append(SimulatedInstance(source, self.violations))
        self.instances[-1].poll()
        return self.instances[-1]

    def remove_instance(self, instance: SimulatedInstance) -> asyncio.Future[None]:
        """Remove ``instance``. The future is done when it has run its batch and every request that is bound to it."""
        (source,) = [source for source in self.model_queue.sources if source is instance.source]
        self.model_queue.replace_instances([], [source])
        return asyncio.ensure_future(self.model_queue.dismiss(source))

    # ------------------------------------------------------------------ time

    def poll_instances(self) -> None:
        """Poll from every instance, as at its start."""
        for instance in self.instances:
            instance.poll()

    async def settle(self, passes: int = 5) -> None:
        """Run the callbacks that are ready on the event loop."""
        for _ in range(passes):
            await asyncio.sleep(0)

    async def advance(self, by_ns: int) -> None:
        await self.settle()
        self.clock.advance(by_ns)
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
                    waits = [ticket.request.id for ticket in self.tickets if not self.answers_to(ticket)]
                    when = "nothing will ever wake it" if next_ns is None else f"{patience_ns / 1e6:g} ms have passed"
                    raise AssertionError(f"every instance is idle and {when}, but requests {waits} still wait")
                self.clock.advance(next_ns - self.clock.now_ns())
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
            self.clock.advance(1_000_000)
            await asyncio.sleep(0)
        self.model_queue.close()
        await self._harness.join_threads()

    # ------------------------------------------------------------------ checks

    def check(self) -> None:
        """Fail if the scheduler did something that no scheduler may do."""
        assert not self.violations, self.violations[0]

    def record(self, instance: InstanceInfo, chosen: Sequence[Ticket] | Wait, waiting: Waiting) -> None:
        """Check the batch that the scheduler returned for ``instance``."""
        self.next_calls += 1
        if isinstance(chosen, Wait):
            if chosen.delay_ns <= 0 or chosen.rows < 1:
                self.violations.append(f"instance '{instance.name}' is to wait for {chosen}, which ends at once")
        elif chosen:
            what = f"the batch {[ticket.request.id for ticket in chosen]} of '{instance.name}'"
            self.violations += [f"{what} {reason}" for reason in _misfits(instance, chosen, waiting, self.has_threads)]


def _misfits(instance: InstanceInfo, chosen: Sequence[Ticket], waiting: Waiting, has_threads: bool) -> Sequence[str]:
    callers = [ticket for ticket in chosen if not isinstance(ticket, Padding)]
    rows, reasons = sum(ticket.rows for ticket in chosen), []
    if rows > instance.slots:
        reasons.append(f"has {rows} rows, and the instance has {instance.slots} slots")
    if not callers:
        reasons.append("is nothing but padding")
    if len(set(callers)) < len(callers):
        reasons.append("has a request twice")
    if len({ticket.batch_key for ticket in callers}) > 1:
        reasons.append("joins requests that do not stack: their batch_key differs")
    if isinstance(chosen, Batch) and len(chosen.added) not in (0, len(chosen)):
        reasons.append(f"adds inputs to {len(chosen.added)} requests, and has {len(chosen)}")
    reason, declared = getattr(chosen, "reason", ""), getattr(chosen, "rows", 0)  # of `Batch` and similar classes
    actual = sum(ticket.rows for ticket in callers)
    if not isinstance(reason, str):
        reasons.append(f"has the reason {reason!r}, which is no text")
    if declared not in (0, actual):
        reasons.append(f"declares {declared} rows, and its requests have {actual}")
    if not has_threads and any(ticket not in waiting for ticket in callers):
        reasons.append("has a request that does not wait")
    return reasons


def _observed(kind: type[Scheduler], simulator: SchedulerSimulator) -> type[Scheduler]:
    """Return ``kind`` with every result and exception recorded by ``simulator``."""

    class Observed(kind):  # type: ignore[misc, valid-type]
        def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
            chosen: Sequence[Ticket] | Wait = recorded(super().next)(instance, now_ns)
            simulator.record(instance, chosen, self.context.waiting)
            return chosen

    def recorded(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return method(*arguments)
            except HeadraceError as error:
                is_refusal = isinstance(error, Unavailable) and method.__name__ == "submit"
                if not (is_refusal or method.__name__ == "rescheduled"):
                    simulator.violations.append(f"{method.__name__} raised {error!r}")
                raise
            except BaseException as error:
                simulator.violations.append(f"{method.__name__} raised {error!r}")
                raise

        return call

    for name in ("submit", "rescheduled", "finished", "expired"):
        method = getattr(kind, name, None)
        # the model queue does less for a scheduler that overrides less
        if method not in (None, getattr(FullScheduler, name)):
            setattr(Observed, name, _recording(method, recorded))
    return Observed


def _recording(method: Callable[..., Any], recorded: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    return lambda self, *arguments: recorded(method)(self, *arguments)


def _append(answers: list[Answer], answer: Answer, final: bool) -> None:
    answers.append(answer)
