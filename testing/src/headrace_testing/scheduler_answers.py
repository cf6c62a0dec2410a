"""Checks of answers: each request is answered once, with its own answer."""

from __future__ import annotations

import asyncio

import pytest

from headrace import BackendError, Cancelled, HeadraceError, InferResponse, Rescheduled, Unavailable
from headrace_testing.example import NAME
from headrace_testing.scheduler_subject import MINUTE, ScheduledSubject, assert_answered, assert_unavailable
from headrace_testing.simulator import SchedulerSimulator, run_scenario


class ScheduledAnswers(ScheduledSubject):
    """Failures, cancellations, the end of the model, and calls of other models."""

    def test_every_request_is_answered_exactly_once(self) -> None:
        async def scenario() -> None:
            simulator = self.simulator(2)
            for number in range(24):
                simulator.send(1 + number % max(1, self.max_batch // 2), number % 3 == 0, **self.fields(number))
                if number % 5 == 0:
                    await simulator.settle()
            await simulator.run(self.patience_ns)
            for ticket in simulator.tickets:
                assert_answered(simulator, ticket)
            simulator.check()

        run_scenario(scenario)

    def test_after_a_failed_batch_the_next_is_run(self) -> None:
        async def scenario() -> None:
            simulator = await self.busy()
            self.send(simulator, 2)
            simulator.instances[0].finish(BackendError("broken"))
            await simulator.run(self.patience_ns)
            first, *others = simulator.tickets
            count = len(simulator.answers_to(first))
            assert count == 1, f"a request that failed is answered {count} times"
            for ticket in others:
                assert_answered(simulator, ticket)
            simulator.check()

        run_scenario(scenario)

    def test_a_cancelled_waiting_request_is_answered_at_once_and_alone(self) -> None:
        async def scenario() -> None:
            for position in range(3):
                simulator = await self.busy()
                tickets = self.send(simulator, 3)
                cancelled = tickets.pop(position)
                cancelled.cancel()
                await simulator.settle()
                at_once = (
                    simulator.answers_to(cancelled) or simulator.model_queue.full_scheduler.keeps_order
                )  # then it is answered in turn
                assert at_once, "a request that is cancelled while it waits is not answered at once"
                await simulator.run(self.patience_ns)
                assert cancelled not in simulator.instances[0].received, "a cancelled request was run"
                answers = simulator.answers_to(cancelled)
                assert [type(answer) for answer in answers] == [Cancelled], f"a cancelled request gets {answers}"
                for ticket in tickets:
                    assert_answered(simulator, ticket)
                simulator.check()

        run_scenario(scenario)

    def test_a_cancelled_running_request_is_answered_alone(self) -> None:
        async def scenario() -> None:
            simulator = await self.busy()
            tickets = self.send(simulator, 4)
            simulator.instances[0].finish()
            await simulator.advance(self.delay_ns)
            running = next(ticket for ticket in simulator.instances[0].batch if ticket in simulator.tickets)
            tickets += self.send(simulator, 2)
            running.cancel()
            await simulator.run(self.patience_ns)
            answers = simulator.answers_to(running)
            assert len(answers) == 1, f"a cancelled request gets {answers}"
            for ticket in tickets:
                if ticket is not running:
                    assert_answered(simulator, ticket)
            simulator.check()

        run_scenario(scenario)

    def test_instances_are_added_and_removed_under_load(self) -> None:
        async def scenario() -> None:
            simulator = self.simulator(2)
            if not simulator.model_queue.can_replace_instances:
                self.not_claimed("its instances cannot be replaced in a loaded version")
            self.send(simulator, 4)
            await simulator.settle()
            removed = simulator.instances[0]
            is_removed = simulator.remove_instance(removed)
            simulator.add_instance()
            self.send(simulator, 4)
            await simulator.run(self.patience_ns)
            await simulator.settle()
            assert is_removed.done(), f"instance '{removed.name}' stays, although every request is answered"
            count = len(removed.received)
            self.send(simulator, 4)
            await simulator.run(self.patience_ns)
            assert len(removed.received) == count, f"instance '{removed.name}' runs requests after its removal"
            for ticket in simulator.tickets:
                assert_answered(simulator, ticket)
            simulator.check()

        run_scenario(scenario)

    def test_a_rescheduled_request_runs_again_until_it_is_answered(self) -> None:
        if not self.declared.reschedules(self.model_config()):
            self.not_claimed("its models run every request once")

        async def scenario() -> None:
            simulator = self.simulator()
            (cancelled, *others), (instance,) = self.send(simulator, 3), simulator.instances
            for _ in range(3 * len(simulator.tickets)):
                await simulator.advance(self.delay_ns)
                instance.finish(Rescheduled())
            cancelled.cancel()
            others += self.send(simulator)
            await simulator.run(self.patience_ns)
            answers = simulator.answers_to(cancelled)
            assert len(answers) == 1, f"a request that was cancelled between two runs gets {answers}"
            for ticket in others:
                assert_answered(simulator, ticket)
            runs = {ticket.request.id: instance.received.count(ticket) for ticket in others[:-1]}
            assert min(runs.values()) > 1, f"rescheduled requests have run this often: {runs}"
            simulator.check()

        run_scenario(scenario)

    def test_draining_runs_accepted_requests_and_refuses_new_ones(self) -> None:
        async def scenario() -> None:
            for count in (1, 2, self.max_batch + 1):
                simulator = self.simulator()
                tickets = self.send(simulator, count)
                draining = asyncio.ensure_future(simulator.model_queue.drain())
                await simulator.settle()
                with pytest.raises(Unavailable):
                    self.send(simulator)
                simulator.tickets.pop()
                await simulator.run(self.patience_ns)
                await draining
                for ticket in tickets:
                    assert_answered(simulator, ticket)
                simulator.check()

        run_scenario(scenario)

    def test_abandoning_answers_every_request_at_once(self) -> None:
        async def scenario() -> None:
            simulator = await self.busy()
            self.send(simulator, 3)
            await simulator.settle()
            batch = simulator.instances[0].batch
            simulator.model_queue.abandon()
            for ticket in simulator.tickets:
                assert_unavailable(simulator, ticket)
            simulator.model_queue.sources[0].deliver(batch, [InferResponse({}) for _ in batch])
            await simulator.advance(MINUTE)
            assert all(len(answers) == 1 for answers in simulator.answers.values()), "a request is answered twice"
            assert simulator.clock.pending == 0, "timers are left after the last answer"
            simulator.check()

        run_scenario(scenario)

    # ------------------------------------------------------------------ calls of other models

    def test_calls_of_other_models_name_their_caller(self) -> None:
        async def scenario() -> None:
            simulator = await self.calling(2)
            for call in simulator.calls:
                request = call.request
                assert request.caller in [ticket.request for ticket in simulator.tickets], (
                    f"a request to '{request.model_name}' names {request.caller} as its caller, not the request it "
                    "serves: a deadlock of models would not be detected"
                )
                assert request.callers == (NAME,), (
                    f"a request to '{request.model_name}' names {request.callers} as its callers, not ('{NAME}',)"
                )
            await simulator.run(self.patience_ns)
            simulator.check()

        run_scenario(scenario)

    def test_a_failure_of_all_called_models_is_an_error(self) -> None:
        async def scenario() -> None:
            simulator = await self.calling()
            while simulator.answer_calls(BackendError("broken")):
                await simulator.settle()
            (ticket,) = simulator.tickets
            answers = simulator.answers_to(ticket)
            assert len(answers) == 1, f"all calls for a request have failed, and it is answered {len(answers)} times"
            assert isinstance(answers[0], HeadraceError), (
                f"all calls for a request have failed, and it gets {answers[0]!r}"
            )
            (ticket,) = self.send(simulator)
            await simulator.run(self.patience_ns)
            assert_answered(simulator, ticket)
            simulator.check()

        run_scenario(scenario)

    def test_cancelling_a_request_cancels_its_calls_of_other_models(self) -> None:
        async def scenario() -> None:
            for position in range(3):
                simulator = await self.calling(3)
                cancelled = simulator.tickets[position]
                cancelled.cancel()
                await simulator.settle()
                answers = simulator.answers_to(cancelled)
                assert [type(answer) for answer in answers] == [Cancelled], f"a cancelled request gets {answers}"
                left = [call.request.model_name for call in simulator.calls if call.request.caller is cancelled.request]
                assert left == [], f"{left} still run calls of a cancelled request"
                await simulator.run(self.patience_ns)
                for ticket in simulator.tickets:
                    if ticket is not cancelled:
                        assert_answered(simulator, ticket)
                assert len(simulator.answers_to(cancelled)) == 1, "a cancelled request is answered again"
                simulator.check()

        run_scenario(scenario)

    def test_abandoning_answers_requests_that_wait_for_other_models(self) -> None:
        async def scenario() -> None:
            simulator = await self.calling(3)
            simulator.model_queue.abandon()
            simulator.answer_calls()
            await simulator.settle()
            for ticket in simulator.tickets:
                assert_unavailable(simulator, ticket)
            assert simulator.clock.pending == 0, "timers are left after the last answer"
            simulator.check()

        run_scenario(scenario)

    async def calling(self, count: int = 1) -> SchedulerSimulator:
        """Return a simulator with ``count`` requests. Each waits for calls of other models."""
        if self.declared.needs_instances:
            self.not_claimed("it needs instances, so its calls of other models are not checked")
        simulator = self.simulator()
        self.send(simulator, count)
        await simulator.settle()
        if not simulator.calls:
            self.not_claimed("it calls no other model")
        return simulator
