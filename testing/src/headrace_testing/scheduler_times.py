"""When and where requests run, and that `next` is not called without a reason."""

from __future__ import annotations

from functools import partial

from headrace import Unavailable
from headrace_testing.scheduler_subject import MINUTE, MS, US, ScheduledSubject, assert_answered
from headrace_testing.stage import Stage, play

#: The duration of an execution, if it matters.
_EXECUTION_NS = 10 * MS


class ScheduledTimes(ScheduledSubject):
    """Batches, delays, order, instances and timeouts."""

    def test_batches_fit_their_instances(self) -> None:
        async def scene() -> None:
            stage = await self.busy(2)
            for number in range(40):
                stage.send(1 + number % self.max_batch, number // 3 % 2, **self.fields(number))
            await stage.run(self.patience_ns)
            stage.check()

        play(scene)

    def test_a_request_alone_waits_as_long_as_is_said_to_the_microsecond(self) -> None:
        self.require_instances()

        async def scene() -> None:
            stage = self.stage()
            for _ in range(3):
                (ticket,) = self.send(stage)
                if self.delay_ns:
                    await stage.turn(self.delay_ns - US)
                    assert not stage.instances[0].batch, f"it is run before {self.delay_ns / US:g} µs have passed"
                    await stage.turn(US)
                await stage.settle()
                assert stage.instances[0].batch == [ticket], f"it is not run after {self.delay_ns / US:g} µs"
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

    def test_requests_run_in_the_order_of_their_priorities(self) -> None:
        if not self.levels:
            self.not_claimed("priorities of requests are not claimed")

        async def scene() -> None:
            stage = await self.busy()
            for priority in [*range(self.levels, 0, -1)] * 2:
                self.send(stage, rows=self.max_batch, priority=priority)
            await stage.run(self.patience_ns)
            ran = [ticket.request.priority for ticket in stage.instances[0].given[1:]]
            assert ran == sorted(ran), f"requests of all priorities wait, and run in the order {ran}"
            stage.check()

        play(scene)

    def test_answers_are_given_in_order_if_the_scheduler_keeps_it(self) -> None:
        async def scene() -> None:
            stage = await self.busy(2)
            if not stage.model_queue.full_scheduler.keeps_order:
                self.not_claimed("answers in the order of requests are not claimed")
            first, second = stage.tickets
            for instance in sorted(stage.instances, key=lambda each: first in each.batch):
                assert not stage.told(second), "a request is answered before one that came before it"
                instance.finish()
            for ticket in stage.tickets:
                assert_answered(stage, ticket)
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
                        f"a request of {rows} rows still waits after {waited_ns / MS:g} ms, because others keep coming"
                    )
                    self.send(stage, max(0, 2 * self.max_batch - stage.model_queue.pending))
                    await stage.turn(_EXECUTION_NS)
                    stage.instances[0].finish()
            await stage.run(self.patience_ns)
            stage.check()

        play(scene)

    def test_every_idle_instance_gets_what_waits(self) -> None:
        self.require_instances()
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
                assert stage.model_queue.pending == 1, "a request runs although no instance is idle"
                instance.finish()
                await stage.turn(self.delay_ns)
                assert stage.model_queue.pending == 0, f"'{instance.name}' is free, and does not get what waits"
            stage.check()

        play(scene)

    def test_a_timeout_is_kept_to_the_microsecond(self) -> None:
        if not self.timeout_us:
            self.not_claimed("timeouts of requests are not claimed")
        if self.postpones:
            self.not_claimed("requests whose time is over are postponed, so none is rejected")

        async def scene() -> None:
            stage = await self.busy()
            (late,) = self.send(stage, timeout_us=self.timeout_us)
            await stage.turn(self.timeout_us * US - US)
            assert not stage.told(late), f"a request that may wait {self.timeout_us} µs is rejected before"
            await stage.turn(US)
            told = stage.told(late) or stage.model_queue.full_scheduler.keeps_order  # then it is answered in turn
            assert told, f"a request that may wait {self.timeout_us} µs is told nothing when they are over"
            await stage.run(self.patience_ns)
            assert [type(answer) for answer in stage.told(late)] == [Unavailable], (
                f"a request that may wait {self.timeout_us} µs is told {stage.told(late)}"
            )
            assert late not in stage.instances[0].given, "a request was run whose time was over"
            stage.check()

        play(scene)

    def test_whose_time_is_over_waits_on_behind_all_others_if_it_is_postponed(self) -> None:
        if not (self.postpones and self.timeout_us):
            self.not_claimed("requests whose time is over are not postponed")

        async def scene(waited_ns: int, is_last: bool) -> None:
            stage = await self.busy()
            (late,) = self.send(stage, rows=self.max_batch, timeout_us=self.timeout_us)
            self.send(stage, rows=self.max_batch)
            await stage.turn(waited_ns)
            assert not stage.told(late), f"a request that is to be postponed is told {stage.told(late)}"
            self.send(stage, rows=self.max_batch)
            await stage.run(self.patience_ns)
            assert_answered(stage, late)
            place = stage.instances[0].given.index(late)
            assert (place == 3) == is_last, (
                f"a request that may wait {self.timeout_us} µs is number {place} of 0 to 3 to run after "
                f"{waited_ns / US:g}"
            )
            stage.check()

        play(partial(scene, self.timeout_us * US - US, False))
        play(partial(scene, self.timeout_us * US, True))

    def test_nobody_is_asked_while_nothing_changes(self) -> None:
        self.require_instances()

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
            await stage.turn(MINUTE)
            assert stage.asked - before <= 4, f"it is asked {stage.asked - before} times in a minute without requests"
            assert stage.clock.pending == 0, "a timer is set, but no request waits"

        play(scene)
