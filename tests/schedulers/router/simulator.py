"""The real model queue and router, with a manual clock and simulated targets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from headrace import Answer, InferRequest, InferResponse, ModelConfig, OtherModel, Spec, Ticket
from headrace.models.configuring import scheduler_parameters
from headrace.schedulers.base import ScheduledModel
from headrace.schedulers.model_queue import ModelQueue
from headrace.telemetry.statistics import ModelStatistics
from headrace_router.router_scheduler import RouterScheduler
from headrace_testing.simulated_parts import ManualClock

from .conftest import config, identity

ROW = np.array([[1, 2]], np.float32)


def specs(of: ModelConfig) -> tuple[dict[str, Spec], dict[str, Spec]]:
    inputs, outputs = ({io.name: Spec.from_config(io) for io in tensors} for tensors in (of.input, of.output))
    return inputs, outputs


def other(text: str, name: str, ask: Callable[[Ticket], None] = lambda ticket: None) -> OtherModel:
    found = config(text, name)
    return OtherModel(found, 1, *specs(found), ask=ask)


@dataclass(slots=True)
class Caller:
    """A caller of the router, and the answers that it got."""

    ticket: Ticket
    answers: list[Answer] = field(default_factory=list)
    ends: int = 0

    @property
    def target(self) -> str:
        """The target of the last response, and the reason."""
        answer = self.answers[-1]
        assert isinstance(answer, InferResponse), answer
        return f"{answer.parameters['headrace_target']} by {answer.parameters['headrace_routed_by']}"


class RouterSimulator:
    """The router ``text``. Its targets have the config ``of``. ``calls`` are the calls without an answer."""

    def __init__(self, text: str, of: Mapping[str, str] | None = None) -> None:
        self.calls: list[Ticket] = []
        self.cancelled: list[Ticket] = []
        self.reads = 0
        #: The error of every call.
        self.refusal: Exception | None = None
        self.config = config(text)
        others = {
            needed: other((of or {}).get(needed.model, identity()), needed.model, self._ask)
            for needed in RouterScheduler.depends_on(self.config)
        }
        RouterScheduler.complete_config(self.config, others)
        self.statistics, self.clock = ModelStatistics(), ManualClock()
        parameters = scheduler_parameters(self.config, RouterScheduler)
        inputs, outputs = specs(self.config)
        model = ScheduledModel(self.config, (), inputs, outputs, parameters=parameters, others=others, version="1")
        self.model_queue = ModelQueue(RouterScheduler, model, self.statistics, asyncio.get_running_loop(), self.clock)
        router = self.model_queue.full_scheduler
        assert isinstance(router, RouterScheduler)
        self.router = router

    def _ask(self, ticket: Ticket) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(ticket)
        ticket.on_read = self._read
        ticket.on_cancel = self._cancel

    def _read(self, ticket: Ticket) -> None:
        self.reads += 1

    def _cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket)

    def send(self, x: Any = ROW, **fields: Any) -> Caller:
        request = InferRequest("r", {"x": x}, **fields)
        caller = Caller(Ticket(request, lambda answer, final: self._deliver(caller, answer, final)))
        caller.ticket.arrival_ns = self.clock.now_ns()
        self.model_queue.submit(caller.ticket)
        return caller

    def _deliver(self, caller: Caller, answer: Answer, final: bool) -> None:
        assert not caller.ends, f"{answer} after the end"
        caller.ends += final
        if answer is not None:
            caller.answers.append(answer)

    def answer(self, answer: Answer = None, final: bool = True, call: Ticket | None = None) -> Ticket:
        """Answer ``call`` (default: the oldest) as its target, with ``answer`` (default: its input)."""
        call = call or self.calls[0]
        if final:
            self.calls.remove(call)
        call.respond(answer or InferResponse({"y": call.request.inputs["x"]}), final)  # type: ignore[dict-item]
        return call

    def answer_last(self) -> None:
        """End the oldest call without a further response."""
        self.calls.pop(0).respond(None, True)

    def serve(self, answer: Answer = None, after_ns: int = 0, **fields: Any) -> Caller:
        """Send a request, and answer it as its target after ``after_ns``."""
        caller = self.send(**fields)
        self.clock.advance(after_ns)
        self.answer(answer)
        return caller
