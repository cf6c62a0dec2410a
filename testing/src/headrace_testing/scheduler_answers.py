"""Checks of answers: whatever a scheduler decides, each request is answered once, with its own answer."""

from __future__ import annotations

import asyncio

import pytest

from headrace import BackendError, Cancelled, HeadraceError, InferResponse, Rescheduled, Unavailable
from headrace_testing.example import NAME
from headrace_testing.scheduler_subject import MINUTE, ScheduledSubject, assert_answered
from headrace_testing.stage import Stage, play


class ScheduledAnswers(ScheduledSubject):
    """Failures, cancellations, the end of the model, and requests to other models."""

    def test_every_request_is_answered_exactly_once(self) -> None:
        async def scene() -> None:
            stage = self.stage(2)
            for number in range(24):
                stage.send(1 + number % max(1, self.max_batch // 2), number % 3 == 0, **self.fields(number))
                if number % 5 == 0:
                    await stage.settle()
            await stage.run(self.patience_ns)
            for ticket in stage.tickets:
                assert_answered(stage, ticket)
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
                assert_answered(stage, ticket)
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
                at_once = (
                    stage.told(gone) or stage.model_queue.full_scheduler.keeps_order
                )  # then it is answered in turn
                assert at_once, "a request that is cancelled while it waits is not answered at once"
                await stage.run(self.patience_ns)
                assert gone not in stage.instances[0].given, "a request was run that had left before"
                told = stage.told(gone)
                assert [type(answer) for answer in told] == [Cancelled], f"a request that had left is told {told}"
                for ticket in tickets:
                    assert_answered(stage, ticket)
                stage.check()

        play(scene)

    def test_cancelling_a_running_request_disturbs_nobody(self) -> None:
        async def scene() -> None:
            stage = await self.busy()
            tickets = self.send(stage, 4)
            stage.instances[0].finish()
            await stage.turn(self.delay_ns)
            running = next(ticket for ticket in stage.instances[0].batch if ticket in stage.tickets)
            tickets += self.send(stage, 2)
            running.cancel()
            await stage.run(self.patience_ns)
            assert len(stage.told(running)) == 1, f"a request that left is told {stage.told(running)}"
            for ticket in tickets:
                if ticket is not running:
                    assert_answered(stage, ticket)
            stage.check()

        play(scene)

    def test_instances_may_come_and_go(self) -> None:
        async def scene() -> None:
            stage = self.stage(2)
            if not stage.model_queue.can_replace_instances:
                self.not_claimed("its model gets other instances by a new version")
            self.send(stage, 4)
            await stage.settle()
            leaving = stage.instances[0]
            left = stage.dismiss(leaving)
            stage.enter()
            self.send(stage, 4)
            await stage.run(self.patience_ns)
            await stage.settle()
            assert left.done(), f"instance '{leaving.name}' is not let go, though everybody is answered"
            given = len(leaving.given)
            self.send(stage, 4)
            await stage.run(self.patience_ns)
            assert len(leaving.given) == given, f"instance '{leaving.name}' runs requests after it was let go"
            for ticket in stage.tickets:
                assert_answered(stage, ticket)
            stage.check()

        play(scene)

    def test_what_its_model_hands_back_is_run_again_until_it_is_answered(self) -> None:
        if not self.declared.reschedules(self.model_config()):
            self.not_claimed("its models run every request once")

        async def scene() -> None:
            stage = self.stage()
            (gone, *others), (instance,) = self.send(stage, 3), stage.instances
            for _ in range(3 * len(stage.tickets)):
                await stage.turn(self.delay_ns)
                instance.finish(Rescheduled())
            gone.cancel()
            others += self.send(stage)
            await stage.run(self.patience_ns)
            assert len(stage.told(gone)) == 1, f"a request that left between two runs is told {stage.told(gone)}"
            for ticket in others:
                assert_answered(stage, ticket)
            runs = {ticket.request.id: instance.given.count(ticket) for ticket in others[:-1]}
            assert min(runs.values()) > 1, f"requests that were handed back have run so often: {runs}"
            stage.check()

        play(scene)

    def test_draining_runs_what_was_taken_in_and_takes_no_more(self) -> None:
        async def scene() -> None:
            for count in (1, 2, self.max_batch + 1):
                stage = self.stage()
                tickets = self.send(stage, count)
                draining = asyncio.ensure_future(stage.model_queue.drain())
                await stage.settle()
                with pytest.raises(Unavailable):
                    self.send(stage)
                stage.tickets.pop()
                await stage.run(self.patience_ns)
                await draining
                for ticket in tickets:
                    assert_answered(stage, ticket)
                stage.check()

        play(scene)

    def test_abandoning_answers_everybody_at_once(self) -> None:
        async def scene() -> None:
            stage = await self.busy()
            self.send(stage, 3)
            await stage.settle()
            batch = stage.instances[0].batch
            stage.model_queue.abandon()
            for ticket in stage.tickets:
                assert [type(answer) for answer in stage.told(ticket)] == [Unavailable], (
                    f"the server does not wait for request '{ticket.request.id}', which is told {stage.told(ticket)}"
                )
            stage.model_queue.sources[0].deliver(batch, [InferResponse({}) for _ in batch])
            await stage.turn(MINUTE)
            assert all(len(told) == 1 for told in stage.answers.values()), "somebody is answered twice"
            assert stage.clock.pending == 0, "timers are left when all is over"
            stage.check()

        play(scene)

    # ------------------------------------------------------------------ schedulers that run without instances

    def test_what_is_asked_of_other_models_says_for_whom(self) -> None:
        async def scene() -> None:
            stage = await self.calling(2)
            for call in stage.calls:
                request = call.request
                assert request.caller in [ticket.request for ticket in stage.tickets], (
                    f"a request to '{request.model_name}' has {request.caller} for its caller, not the request that it "
                    "was sent for: models that wait for each other are not found"
                )
                assert request.callers == (NAME,), (
                    f"a request to '{request.model_name}' has {request.callers} for its callers, not ('{NAME}',)"
                )
            await stage.run(self.patience_ns)
            stage.check()

        play(scene)

    def test_a_failure_of_all_models_that_are_asked_is_told(self) -> None:
        async def scene() -> None:
            stage = await self.calling()
            while stage.answer_calls(BackendError("broken")):
                await stage.settle()
            (ticket,) = stage.tickets
            told = stage.told(ticket)
            assert len(told) == 1, f"all that was asked for a request has failed, and it is answered {len(told)} times"
            assert isinstance(told[0], HeadraceError), f"all that was asked for a request has failed: told {told[0]!r}"
            (ticket,) = self.send(stage)
            await stage.run(self.patience_ns)
            assert_answered(stage, ticket)
            stage.check()

        play(scene)

    def test_who_leaves_takes_along_what_was_asked_for_him(self) -> None:
        async def scene() -> None:
            for position in range(3):
                stage = await self.calling(3)
                gone = stage.tickets[position]
                gone.cancel()
                await stage.settle()
                told = [type(answer) for answer in stage.told(gone)]
                assert told == [Cancelled], f"a request whose caller has gone is told {stage.told(gone)}"
                left = [call.request.model_name for call in stage.calls if call.request.caller is gone.request]
                assert left == [], f"{left} are still asked for a caller who has gone"
                await stage.run(self.patience_ns)
                for ticket in stage.tickets:
                    if ticket is not gone:
                        assert_answered(stage, ticket)
                assert len(stage.told(gone)) == 1, "a request whose caller has gone is answered again"
                stage.check()

        play(scene)

    def test_abandoning_answers_those_for_whom_other_models_are_asked(self) -> None:
        async def scene() -> None:
            stage = await self.calling(3)
            stage.model_queue.abandon()
            stage.answer_calls()
            await stage.settle()
            for ticket in stage.tickets:
                assert [type(answer) for answer in stage.told(ticket)] == [Unavailable], (
                    f"the server does not wait for request '{ticket.request.id}', which is told {stage.told(ticket)}"
                )
            assert stage.clock.pending == 0, "timers are left when all is over"
            stage.check()

        play(scene)

    async def calling(self, count: int = 1) -> Stage:
        """Return a stage with ``count`` requests, for each of which other models are called."""
        if self.declared.needs_instances:
            self.not_claimed("it needs instances, so what it asks of other models is not checked")
        stage = self.stage()
        self.send(stage, count)
        await stage.settle()
        if not stage.calls:
            self.not_claimed("it asks no other model")
        return stage
