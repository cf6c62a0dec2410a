"""Checks of batches, times, order and instances, and that `next` is not called without a reason."""

from __future__ import annotations

from functools import partial

from headrace import Unavailable
from headrace_testing.scheduler_subject import MINUTE, MS, US, ScheduledSubject, assert_answered
from headrace_testing.simulator import SchedulerSimulator, run_scenario

#: The duration of an execution, if it matters.
_EXECUTION_NS = 10 * MS


class ScheduledTimes(ScheduledSubject):
    """Batches, delays, order, instances and timeouts."""

    def test_batches_fit_their_instances(self) -> None:
        async def scenario() -> None:
            simulator = await self.busy(2)
            for number in range(40):
                simulator.send(1 + number % self.max_batch, number // 3 % 2, **self.fields(number))
            await simulator.run(self.patience_ns)
            simulator.check()

        run_scenario(scenario)

    def test_a_single_request_waits_delay_ns_to_the_microsecond(self) -> None:
        self.require_instances()

        async def scenario() -> None:
            simulator = self.simulator()
            for _ in range(3):
                (ticket,) = self.send(simulator)
                if self.delay_ns:
                    await simulator.advance(self.delay_ns - US)
                    assert not simulator.instances[0].batch, f"it is run before {self.delay_ns / US:g} µs have passed"
                    await simulator.advance(US)
                await simulator.settle()
                assert simulator.instances[0].batch == [ticket], f"it is not run after {self.delay_ns / US:g} µs"
                simulator.instances[0].finish()
            simulator.check()

        run_scenario(scenario)

    def test_equal_requests_run_in_order_of_arrival(self) -> None:
        if not self.in_order:
            self.not_claimed("an order among equal requests is not claimed")

        async def scenario() -> None:
            simulator = await self.busy()
            self.send(simulator, 3 * self.max_batch)
            await simulator.run(self.patience_ns)
            ran = [int(ticket.request.id) for ticket in simulator.instances[0].received]
            assert ran == sorted(ran), f"they arrived in order of their numbers, and ran as {ran}"

        run_scenario(scenario)

    def test_requests_run_in_order_of_priority(self) -> None:
        if not self.levels:
            self.not_claimed("priorities of requests are not claimed")

        async def scenario() -> None:
            simulator = await self.busy()
            for priority in [*range(self.levels, 0, -1)] * 2:
                self.send(simulator, rows=self.max_batch, priority=priority)
            await simulator.run(self.patience_ns)
            ran = [ticket.request.priority for ticket in simulator.instances[0].received[1:]]
            assert ran == sorted(ran), f"requests of all priorities wait, and run in the order {ran}"
            simulator.check()

        run_scenario(scenario)

    def test_answers_keep_the_order_of_requests(self) -> None:
        async def scenario() -> None:
            simulator = await self.busy(2)
            if not simulator.model_queue.full_scheduler.keeps_order:
                self.not_claimed("answers in the order of requests are not claimed")
            first, second = simulator.tickets
            for instance in sorted(simulator.instances, key=lambda each: first in each.batch):
                assert not simulator.answers_to(second), "a request is answered before an earlier one"
                instance.finish()
            for ticket in simulator.tickets:
                assert_answered(simulator, ticket)
            simulator.check()

        run_scenario(scenario)

    def test_a_request_does_not_starve(self) -> None:
        longest_ns = self.longest_wait_ns
        if longest_ns is None:
            self.not_claimed("no longest wait is claimed: a request may starve while others arrive")

        async def scenario() -> None:
            simulator = await self.busy()
            for rows in (self.max_batch, 1):
                (patient,) = self.send(simulator, rows=rows)
                begun_ns = simulator.clock.now_ns()
                while patient not in simulator.instances[0].received:
                    waited_ns = simulator.clock.now_ns() - begun_ns
                    assert waited_ns <= longest_ns, (
                        f"a request of {rows} rows waits for {waited_ns / MS:g} ms, because others keep arriving"
                    )
                    self.send(simulator, max(0, 2 * self.max_batch - simulator.model_queue.pending))
                    await simulator.advance(_EXECUTION_NS)
                    simulator.instances[0].finish()
            await simulator.run(self.patience_ns)
            simulator.check()

        run_scenario(scenario)

    def test_every_idle_instance_gets_waiting_requests(self) -> None:
        self.require_instances()
        if not self.any_instance:
            self.not_claimed("it is not claimed that any idle instance gets waiting requests")

        async def scenario() -> None:
            simulator = self.simulator(3)
            for number in range(3):
                self.send(simulator)
                await simulator.advance(self.delay_ns)
                busy = sum(bool(instance.batch) for instance in simulator.instances)
                assert busy == number + 1, f"{3 - busy} instances are idle, while {3 - number - 1} should be"
            for instance in reversed(simulator.instances):
                self.send(simulator)
                await simulator.settle()
                assert simulator.model_queue.pending == 1, "a request runs although no instance is idle"
                instance.finish()
                await simulator.advance(self.delay_ns)
                assert simulator.model_queue.pending == 0, (
                    f"'{instance.name}' is idle, and does not get the waiting request"
                )
            simulator.check()

        run_scenario(scenario)

    def test_a_timeout_is_exact_to_the_microsecond(self) -> None:
        if not self.timeout_us:
            self.not_claimed("timeouts of requests are not claimed")
        if self.postpones:
            self.not_claimed("expired requests are postponed, so none is rejected")

        async def scenario() -> None:
            simulator = await self.busy()
            (late,) = self.send(simulator, timeout_us=self.timeout_us)
            await simulator.advance(self.timeout_us * US - US)
            assert not simulator.answers_to(late), f"a request that may wait {self.timeout_us} µs is rejected before"
            await simulator.advance(US)
            keeps_order = simulator.model_queue.full_scheduler.keeps_order  # then it is answered in turn
            assert simulator.answers_to(late) or keeps_order, (
                f"a request that may wait {self.timeout_us} µs has no answer after that time"
            )
            await simulator.run(self.patience_ns)
            assert [type(answer) for answer in simulator.answers_to(late)] == [Unavailable], (
                f"a request that may wait {self.timeout_us} µs gets {simulator.answers_to(late)}"
            )
            assert late not in simulator.instances[0].received, "an expired request was run"
            simulator.check()

        run_scenario(scenario)

    def test_a_postponed_request_runs_after_all_others(self) -> None:
        if not (self.postpones and self.timeout_us):
            self.not_claimed("expired requests are not postponed")

        async def scenario(waited_ns: int, is_last: bool) -> None:
            simulator = await self.busy()
            (late,) = self.send(simulator, rows=self.max_batch, timeout_us=self.timeout_us)
            self.send(simulator, rows=self.max_batch)
            await simulator.advance(waited_ns)
            answers = simulator.answers_to(late)
            assert not answers, f"a request that must be postponed gets {answers}"
            self.send(simulator, rows=self.max_batch)
            await simulator.run(self.patience_ns)
            assert_answered(simulator, late)
            place = simulator.instances[0].received.index(late)
            assert (place == 3) == is_last, (
                f"a request that may wait {self.timeout_us} µs is number {place} of 0 to 3 to run after "
                f"{waited_ns / US:g}"
            )
            simulator.check()

        run_scenario(partial(scenario, self.timeout_us * US - US, False))
        run_scenario(partial(scenario, self.timeout_us * US, True))

    def test_next_is_not_called_while_nothing_changes(self) -> None:
        self.require_instances()

        async def quiet(simulator: SchedulerSimulator, when: str) -> None:
            await simulator.settle()
            before = simulator.next_calls
            await simulator.settle(50)
            calls = simulator.next_calls - before
            assert calls == 0, f"{when}: next is called {calls} times in 50 passes of the loop"

        async def scenario() -> None:
            await quiet(self.simulator(2), "nothing was ever sent")
            simulator = await self.busy(2)
            self.send(simulator, 3)
            await quiet(simulator, "all instances are busy")
            await simulator.run(self.patience_ns)
            self.send(simulator)
            await quiet(simulator, "a request is alone")
            await simulator.run(self.patience_ns)
            before = simulator.next_calls
            await simulator.advance(MINUTE)
            calls = simulator.next_calls - before
            assert calls <= 4, f"next is called {calls} times in a minute without requests"
            assert simulator.clock.pending == 0, "a timer is set, but no request waits"

        run_scenario(scenario)
