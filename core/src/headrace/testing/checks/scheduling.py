"""What every scheduler owes to callers, instances and the server, whatever it decides."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
from google.protobuf import text_format

from headrace.backends.base import NoParameters
from headrace.config.model_config_pb2 import ModelConfig, ModelParameter
from headrace.config.parameters import SCHEDULER, unknown
from headrace.errors import BackendError, Cancelled, Unavailable
from headrace.messages import dtypes
from headrace.messages.response import InferResponse
from headrace.messages.ticket import Ticket
from headrace.schedulers.base import Scheduler
from headrace.testing.driving import part_of
from headrace.testing.example import NAME, write_model
from headrace.testing.plugin import NOT_RUN
from headrace.testing.serving import serve
from headrace.testing.stage import Stage, play

_US = 1000
_MS = 1_000_000
_MINUTE = 60_000 * _MS
#: How long an execution takes where that matters.
_EXECUTION_NS = 10 * _MS


class Scheduling:
    """The scheduler, what it claims, and the checks.

    ``plugin`` is the module of the entry point, ``scheduler`` the name in configs. ``config`` is more text for the
    model's config: ``scheduling_choice``, the scheduler's parameters. The claims: ``max_batch`` rows in one execution;
    ``delay_ns``, how long a request that is alone waits for others while an instance is idle; ``in_order``, that
    requests which differ in nothing run in the order in which they came; ``longest_wait_ns``, how long a request waits
    at most while others keep coming and each execution takes 10 ms, None for no promise; ``timeout_us``, a timeout
    that requests may have and that is kept, 0 for none; ``any_instance``, that whichever is idle gets what waits;
    ``patience_ns``, what the kit lets pass at most until all that it has sent is answered.
    """

    plugin: ClassVar[str]
    scheduler: ClassVar[str]
    config: ClassVar[str] = ""
    max_batch: ClassVar[int] = 8
    delay_ns: ClassVar[int] = 0
    in_order: ClassVar[bool] = True
    longest_wait_ns: ClassVar[int | None] = 1000 * _MS
    timeout_us: ClassVar[int] = 0
    any_instance: ClassVar[bool] = True
    patience_ns: ClassVar[int] = _MINUTE

    def fields(self, number: int) -> Mapping[str, Any]:
        """What the request of that number has beside rows: fields of `headrace.InferRequest`."""
        return {}

    @property
    def scheduler_class(self) -> type[Scheduler]:
        found: type[Scheduler] = part_of(self.plugin, "scheduler", self.scheduler)
        return found

    def model_config(self) -> ModelConfig:
        """The config of a model that chooses the scheduler."""
        config = text_format.Parse(self.config, ModelConfig(name=NAME, backend="identity"))
        config.max_batch_size = config.max_batch_size or self.max_batch
        config.parameters[SCHEDULER].string_value = self.scheduler
        for tensors, name in ((config.input, "x"), (config.output, "y")):
            if not tensors:
                tensors.add(name=name, data_type=dtypes.FP32.config_value, dims=[1])
        return config

    def stage(self, instances: int = 1) -> Stage:
        """The scheduler with so many idle instances."""
        stage = Stage(self.scheduler_class, self.model_config(), instances)
        stage.begin()
        return stage

    def send(self, stage: Stage, count: int = 1, rows: int = 1, **fields: Any) -> list[Ticket]:
        number = len(stage.tickets)
        return [stage.send(rows, **{**self.fields(number + more), **fields}) for more in range(count)]

    async def busy(self, instances: int = 1) -> Stage:
        """A stage whose instances are at work, each on a request of its own."""
        stage = self.stage(instances)
        for _ in stage.instances:
            self.send(stage)
            await stage.turn(self.delay_ns)
        if not all(instance.batch for instance in stage.instances):
            self.not_claimed("any idle instance gets what waits is not claimed, so not all can be kept busy")
        return stage

    def not_claimed(self, what: str) -> NoReturn:
        """Skip this check, and have the summary say so."""
        pytest.skip(f"{NOT_RUN}{self.scheduler}: {what}")

    # ------------------------------------------------------------------ who is answered

    def test_every_request_is_answered_exactly_once(self) -> None:
        async def scene() -> None:
            stage = self.stage(2)
            for number in range(24):
                stage.send(1 + number % max(1, self.max_batch // 2), number % 3 == 0, **self.fields(number))
                if number % 5 == 0:
                    await stage.settle()
            await stage.run(self.patience_ns)
            for ticket in stage.tickets:
                _answered(stage, ticket)
            stage.check()

        play(scene)

    def test_after_a_failed_batch_the_next_is_run(self) -> None:
        async def scene() -> None:
            stage = await self.busy()
            self.send(stage, 2)
            stage.instances[0].finish(BackendError("broken"))
            await stage.run(self.patience_ns)
            first, *others = stage.tickets
            assert len(stage.told(first)) == 1, f"a request that failed is answered {len(stage.told(first))} times"
            for ticket in others:
                _answered(stage, ticket)
            stage.check()

        play(scene)

    def test_cancelling_a_waiting_request_answers_it_at_once_and_disturbs_nobody(self) -> None:
        async def scene() -> None:
            for position in range(3):
                stage = await self.busy()
                tickets = self.send(stage, 3)
                gone = tickets.pop(position)
                gone.cancel()
                await stage.settle()
                at_once = stage.told(gone) or stage.kernel.scheduler.keeps_order  # then it is told in its turn
                assert at_once, "a request that is cancelled while it waits is not answered at once"
                await stage.run(self.patience_ns)
                assert gone not in stage.instances[0].given, "a request was run that had left before"
                told = stage.told(gone)
                assert [type(answer) for answer in told] == [Cancelled], f"a request that had left is told {told}"
                for ticket in tickets:
                    _answered(stage, ticket)
                stage.check()

        play(scene)

    def test_cancelling_a_running_request_disturbs_nobody(self) -> None:
        async def scene() -> None:
            stage = await self.busy()
            tickets = self.send(stage, 4)
            stage.instances[0].finish()
            await stage.turn(self.delay_ns)
            running = stage.instances[0].batch[0]
            tickets += self.send(stage, 2)
            running.cancel()
            await stage.run(self.patience_ns)
            assert len(stage.told(running)) == 1, f"a request that left is told {stage.told(running)}"
            for ticket in tickets:
                if ticket is not running:
                    _answered(stage, ticket)
            stage.check()

        play(scene)

    def test_draining_runs_what_was_taken_in_and_takes_no_more(self) -> None:
        async def scene() -> None:
            for count in (1, 2, self.max_batch + 1):
                stage = self.stage()
                tickets = self.send(stage, count)
                draining = asyncio.ensure_future(stage.kernel.drain())
                await stage.settle()
                with pytest.raises(Unavailable):
                    self.send(stage)
                stage.tickets.pop()
                await stage.run(self.patience_ns)
                await draining
                for ticket in tickets:
                    _answered(stage, ticket)
                stage.check()

        play(scene)

    def test_abandoning_answers_everybody_at_once(self) -> None:
        async def scene() -> None:
            stage = await self.busy()
            self.send(stage, 3)
            await stage.settle()
            batch = stage.instances[0].batch
            stage.kernel.abandon()
            for ticket in stage.tickets:
                assert [type(answer) for answer in stage.told(ticket)] == [Unavailable], (
                    f"the server does not wait for request '{ticket.request.id}', which is told {stage.told(ticket)}"
                )
            stage.kernel.sources[0].deliver(batch, [InferResponse({}) for _ in batch])
            await stage.turn(_MINUTE)
            assert all(len(told) == 1 for told in stage.answers.values()), "somebody is answered twice"
            assert stage.clock.pending == 0, "timers are left when all is over"
            stage.check()

        play(scene)

    # ------------------------------------------------------------------ when and where they run

    def test_batches_fit_their_instances(self) -> None:
        async def scene() -> None:
            stage = await self.busy(2)
            for number in range(40):
                stage.send(1 + number % self.max_batch, number // 3 % 2, **self.fields(number))
            await stage.run(self.patience_ns)
            stage.check()

        play(scene)

    def test_a_request_alone_waits_as_long_as_is_said_to_the_microsecond(self) -> None:
        async def scene() -> None:
            stage = self.stage()
            for _ in range(3):
                (ticket,) = self.send(stage)
                if self.delay_ns:
                    await stage.turn(self.delay_ns - _US)
                    assert not stage.instances[0].batch, f"it is run before {self.delay_ns / _US:g} µs have passed"
                    await stage.turn(_US)
                await stage.settle()
                assert stage.instances[0].batch == [ticket], f"it is not run after {self.delay_ns / _US:g} µs"
                stage.instances[0].finish()
            stage.check()

        play(scene)

    def test_requests_that_differ_in_nothing_run_in_the_order_in_which_they_came(self) -> None:
        if not self.in_order:
            self.not_claimed("an order among requests that differ in nothing is not claimed")

        async def scene() -> None:
            stage = await self.busy()
            self.send(stage, 3 * self.max_batch)
            await stage.run(self.patience_ns)
            ran = [int(ticket.request.id) for ticket in stage.instances[0].given]
            assert ran == sorted(ran), f"they came in order of their numbers, and ran as {ran}"

        play(scene)

    def test_answers_are_given_in_order_if_the_scheduler_keeps_it(self) -> None:
        async def scene() -> None:
            stage = await self.busy(2)
            if not stage.kernel.scheduler.keeps_order:
                self.not_claimed("answers in the order of requests are not claimed")
            first, second = stage.tickets
            for instance in sorted(stage.instances, key=lambda each: first in each.batch):
                assert not stage.told(second), "a request is answered before one that came before it"
                instance.finish()
            for ticket in stage.tickets:
                _answered(stage, ticket)
            stage.check()

        play(scene)

    def test_a_request_is_run_however_many_others_keep_coming(self) -> None:
        longest_ns = self.longest_wait_ns
        if longest_ns is None:
            self.not_claimed("how long a request may wait while others keep coming is not said: it may starve")

        async def scene() -> None:
            stage = await self.busy()
            for rows in (self.max_batch, 1):
                (patient,) = self.send(stage, rows=rows)
                begun_ns = stage.clock.now_ns()
                while patient not in stage.instances[0].given:
                    waited_ns = stage.clock.now_ns() - begun_ns
                    assert waited_ns <= longest_ns, (
                        f"a request of {rows} rows still waits after {waited_ns / _MS:g} ms, because others keep coming"
                    )
                    self.send(stage, max(0, 2 * self.max_batch - stage.kernel.pending))
                    await stage.turn(_EXECUTION_NS)
                    stage.instances[0].finish()
            await stage.run(self.patience_ns)
            stage.check()

        play(scene)

    def test_every_idle_instance_gets_what_waits(self) -> None:
        if not self.any_instance:
            self.not_claimed("any idle instance gets what waits is not claimed")

        async def scene() -> None:
            stage = self.stage(3)
            for number in range(3):
                self.send(stage)
                await stage.turn(self.delay_ns)
                busy = sum(bool(instance.batch) for instance in stage.instances)
                assert busy == number + 1, f"{3 - busy} instances are idle, while {3 - number - 1} should be"
            for instance in reversed(stage.instances):
                self.send(stage)
                await stage.settle()
                assert stage.kernel.pending == 1, "a request runs that nobody is free for"
                instance.finish()
                await stage.turn(self.delay_ns)
                assert stage.kernel.pending == 0, f"'{instance.name}' is free, and does not get what waits"
            stage.check()

        play(scene)

    def test_a_timeout_is_kept_to_the_microsecond(self) -> None:
        if not self.timeout_us:
            self.not_claimed("timeouts of requests are not claimed")

        async def scene() -> None:
            stage = await self.busy()
            (late,) = self.send(stage, timeout_us=self.timeout_us)
            await stage.turn(self.timeout_us * _US - _US)
            assert not stage.told(late), f"a request that may wait {self.timeout_us} µs is rejected before"
            await stage.turn(_US)
            assert [type(answer) for answer in stage.told(late)] == [Unavailable], (
                f"a request that may wait {self.timeout_us} µs is told {stage.told(late)} when they are over"
            )
            await stage.run(self.patience_ns)
            assert late not in stage.instances[0].given, "a request was run whose time was over"
            stage.check()

        play(scene)

    def test_nobody_is_asked_while_nothing_changes(self) -> None:
        async def quiet(stage: Stage, when: str) -> None:
            await stage.settle()
            before = stage.asked
            await stage.settle(50)
            assert stage.asked == before, f"{when}: it is asked {stage.asked - before} times in 50 turns of the loop"

        async def scene() -> None:
            await quiet(self.stage(2), "nothing was ever sent")
            stage = await self.busy(2)
            self.send(stage, 3)
            await quiet(stage, "all instances are busy")
            await stage.run(self.patience_ns)
            self.send(stage)
            await quiet(stage, "a request is alone")
            await stage.run(self.patience_ns)
            before = stage.asked
            await stage.turn(_MINUTE)
            assert stage.asked - before <= 4, f"it is asked {stage.asked - before} times in a minute without requests"
            assert stage.clock.pending == 0, "a timer is set, though nobody waits"

        play(scene)

    # ------------------------------------------------------------------ on threads, and in a server

    def test_threads_run_everything_and_the_statistics_add_up(self) -> None:
        async def scene() -> None:
            stage = Stage(self.scheduler_class, self.model_config(), 2)
            threads = await stage.start_threads()
            for number in range(60):
                (ticket,) = self.send(stage, rows=1 + number % 2)
                if number % 7 == 0:
                    ticket.cancel()
                if number % 10 == 0:
                    await stage.settle()
            await stage.end_threads(threads)
            assert all(len(told) == 1 for told in stage.answers.values()), "not everybody is answered once"
            stage.check()
            _add_up(stage)

        play(scene)

    def test_a_server_finds_and_serves_it(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        repository = tmp_path_factory.mktemp("repository")
        write_model(repository, self.model_config())
        with serve(repository, strict_readiness=False, exit_on_error=False) as server:
            names = server.plugins.schedulers.names()
            assert self.scheduler in names, (
                f"no installed distribution brings scheduler '{self.scheduler}', only {', '.join(names)}; add an entry "
                f'point of the group headrace: {self.scheduler} = "{self.plugin}"'
            )
            (entry,) = server.index()
            assert entry.state == "READY", f"a model that chooses it does not load: {entry.reason}"
            x = np.ones((2, 1), np.float32)
            np.testing.assert_array_equal(np.asarray(server.infer(NAME, {"x": x}).outputs["y"]), x)

    def test_an_unknown_parameter_is_named_with_the_known(self) -> None:
        kind = self.scheduler_class.Parameters
        if kind is NoParameters:
            self.not_claimed("the scheduler declares no Parameters, so it knows none")
        problems = unknown(kind, {"no_such_parameter": ModelParameter(string_value="1")})
        assert problems, "nothing is said of the parameter 'no_such_parameter'"
        assert "no_such_parameter" in problems[0].message, f"the parameter is not named: {problems[0].message}"


def _answered(stage: Stage, ticket: Ticket) -> None:
    """Fail unless the caller of ``ticket`` has its own answer, and no other."""
    told = stage.told(ticket)
    assert len(told) == 1, f"request '{ticket.request.id}' is answered {len(told)} times"
    assert isinstance(told[0], InferResponse), f"request '{ticket.request.id}' is told {told[0]!r}"
    assert told[0].id == ticket.request.id, f"request '{ticket.request.id}' gets the answer of '{told[0].id}'"


def _add_up(stage: Stage) -> None:
    numbers = stage.statistics.snapshot()
    gone = [ticket for ticket in stage.tickets if isinstance(stage.told(ticket)[0], Cancelled)]
    rows = sum(stage.rows[ticket.request.id] for ticket in stage.tickets if ticket not in gone)
    for what, counted, right in (
        ("answers", numbers.success.count, len(stage.tickets) - len(gone)),
        ("rows", numbers.executions.inference_count, rows),
        ("cancelled requests", numbers.cancelled.count, len(gone)),
        ("waiting requests", stage.kernel.pending, 0),
    ):
        assert counted == right, f"{counted} {what} are counted, and there were {right}"
