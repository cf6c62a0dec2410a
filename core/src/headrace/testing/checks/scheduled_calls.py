"""A scheduler that runs without instances: other models answer for it."""

from __future__ import annotations

from headrace.errors import BackendError, Cancelled, HeadraceError, Unavailable
from headrace.testing.checks.scheduled_subject import ScheduledSubject, assert_answered
from headrace.testing.example import NAME
from headrace.testing.stage import Stage, play


class ScheduledCalls(ScheduledSubject):
    """What it asks of other models, and what becomes of it."""

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
            stage.kernel.abandon()
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
        """A stage with so many requests, for each of which other models are asked."""
        if self.scheduler_class.needs_instances:
            self.not_claimed("it needs instances, so what it asks of other models is not checked")
        stage = self.stage()
        self.send(stage, count)
        await stage.settle()
        if not stage.calls:
            self.not_claimed("it asks no other model")
        return stage
