"""The real model queue and ensemble scheduler, with a manual clock and simulated models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import text_format

from headrace import Answer, Dependency, InferRequest, InferResponse, ModelConfig, OtherModel, Spec, Ticket
from headrace.models.configuring import scheduler_parameters
from headrace.schedulers.base import ScheduledModel
from headrace.schedulers.model_queue import ModelQueue
from headrace.telemetry.statistics import ModelStatistics
from headrace_ensemble import EnsembleScheduler
from headrace_testing.simulated_parts import ManualClock


def parsed(text: str, name: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig(name=name))


def specs(config: ModelConfig) -> tuple[dict[str, Spec], dict[str, Spec]]:
    inputs, outputs = ({io.name: Spec.from_config(io) for io in tensors} for tensors in (config.input, config.output))
    return inputs, outputs


def other(config: str, name: str, ask: Callable[[Ticket], None] | None = None, labels: Any = None) -> OtherModel:
    """Return a model whose calls go to ``ask``."""
    found = parsed(config, name)
    return OtherModel(found, 1, *specs(found), labels or {}, ask or (lambda ticket: None))


@dataclass(slots=True)
class Caller:
    """A caller of the ensemble, and the answers that it got."""

    ticket: Ticket
    answers: list[Answer]
    ends: int = 0

    @property
    def outputs(self) -> list[dict[str, Any]]:
        return [
            {name: np.asarray(x).tolist() for name, x in answer.outputs.items()}
            for answer in self.answers
            if isinstance(answer, InferResponse)
        ]


class EnsembleSimulator:
    """The ensemble ``config`` of ``models``, by name. ``calls`` are the calls that no model has answered, in order."""

    def __init__(self, config: str, models: Mapping[str, str]) -> None:
        self.calls: list[Ticket] = []
        self.reads = 0
        self.requests: list[InferRequest] = []
        #: The error of every call, and the number of calls that got it.
        self.refusal: Exception | None = None
        self.refused = 0
        parsed_config = parsed(config, "e")
        others = {
            needed: self._model(models[needed.model], needed) for needed in EnsembleScheduler.depends_on(parsed_config)
        }
        EnsembleScheduler.complete_config(parsed_config, others)
        self.config, self.statistics, self.clock = parsed_config, ModelStatistics(), ManualClock()
        parameters = scheduler_parameters(parsed_config, EnsembleScheduler)
        inputs, outputs = specs(parsed_config)
        model = ScheduledModel(parsed_config, (), inputs, outputs, parameters=parameters, others=others, version="1")
        self.model_queue = ModelQueue(EnsembleScheduler, model, self.statistics, asyncio.get_running_loop(), self.clock)

    def _model(self, config: str, needed: Dependency) -> OtherModel:
        return other(config, needed.model, self._ask)

    def _ask(self, ticket: Ticket) -> None:
        if self.refusal is not None:
            self.refused += 1
            raise self.refusal
        self.calls.append(ticket)
        self.requests.append(ticket.request)
        ticket.on_read = self._read

    def _read(self, ticket: Ticket) -> None:
        self.reads += 1

    def send(self, inputs: Mapping[str, Any], outputs: Sequence[str] = (), **fields: Any) -> Caller:
        answers: list[Answer] = []
        request = InferRequest("e", inputs, outputs, **fields)
        ticket = Ticket(request, lambda answer, final: self._deliver(caller, answer, final))
        caller = Caller(ticket, answers)
        self.model_queue.submit(caller.ticket)
        return caller

    def _deliver(self, caller: Caller, answer: Answer, final: bool) -> None:
        assert not caller.ends, f"{answer} after the end"
        caller.ends += final
        if answer is not None:
            caller.answers.append(answer)
        if not final and self.config.model_transaction_policy.decoupled:
            caller.ticket.read()

    def answer(self, call: Ticket, answer: Answer | Mapping[str, Any], final: bool = True) -> None:
        """Answer ``call`` as its model."""
        if final:
            self.calls.remove(call)
        call.respond(InferResponse(dict(answer)) if isinstance(answer, Mapping) else answer, final)

    def call(self, model: str) -> Ticket:
        """Return the first call that ``model`` has not answered."""
        return next(call for call in self.calls if call.request.model_name == model)
