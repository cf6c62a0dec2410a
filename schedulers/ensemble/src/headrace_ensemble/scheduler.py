"""The scheduler of ensembles: no instances; every request is a `Dataflow` through other models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from headrace import (
    Answer,
    Dependency,
    FullScheduler,
    HeadraceError,
    InstanceInfo,
    ModelConfig,
    OtherModel,
    Problem,
    SchedulerContext,
    Ticket,
)
from headrace_ensemble import ensemble_rules
from headrace_ensemble.consistency import check
from headrace_ensemble.dataflow import Dataflow
from headrace_ensemble.plan import DataflowPlan, EnsembleGraph, dependency_of

_NOWHERE: Mapping[str, bool] = MappingProxyType({})
#: At most 64 plans are kept. Most callers request the same outputs.
_PLANS = 64


class EnsembleScheduler(FullScheduler):
    """Lets the models of the steps answer, as ``ensemble_scheduling`` says."""

    name: ClassVar[str] = "ensemble_scheduling"
    needs_instances: ClassVar[bool] = False

    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        return ensemble_rules.check(config)

    @classmethod
    def depends_on(cls, config: ModelConfig) -> Collection[Dependency]:
        return {dependency_of(step) for step in config.ensemble_scheduling.step}

    @classmethod
    def complete_config(cls, config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> None:
        config.model_transaction_policy.decoupled = check(config, others)

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        config = context.config
        self._name, self._answer = config.name, context.answer
        self._is_decoupled = config.model_transaction_policy.decoupled
        self._limit = config.ensemble_scheduling.max_inflight_requests
        self._graph = EnsembleGraph(config, context.others)
        self.takes_device_tensors = self._graph.takes_device_tensors
        self._plans: dict[tuple[object, ...], DataflowPlan] = {(): self._graph.plan()}
        self._under_way: dict[Ticket, Dataflow] = {}
        self.labels = _labels(config, context.others)

    def submit(self, ticket: Ticket) -> int:
        requested = tuple(ticket.request.outputs)
        on_device = _NOWHERE if self.takes_device_tensors is None else getattr(ticket, "on_device", _NOWHERE)
        key = (*requested, *on_device.items()) if on_device else requested
        plan = self._plans.get(key) or self._plan(key, requested, on_device)
        flow = Dataflow(self._name, plan, ticket, self._finish, self._is_decoupled, self._limit)
        self._under_way[ticket] = flow
        ticket.started_ns = ticket.queued_ns  # a request waits only in steps, which count the time
        if self._is_decoupled:
            ticket.on_read = flow.read
        flow.start()
        return 0

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket]:
        raise AssertionError("an ensemble has no instances")

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        """Stop the dataflows of cancelled requests. Their callers get ``answers``."""
        for ticket, answer in zip(tickets, answers, strict=True):
            flow = self._under_way.pop(ticket, None)
            if flow is not None and isinstance(answer, HeadraceError):
                flow.cancel(answer)

    def _finish(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        """Answer ``ticket``, unless its caller has the last answer already: see `finished`."""
        flow = self._under_way.get(ticket)
        if flow is None:
            return
        if final:
            del self._under_way[ticket]
            ticket.spans_ns = flow.spans_ns
        self._answer(ticket, answer, final)

    def _plan(self, key: Any, requested: Sequence[str], on_device: Mapping[str, bool]) -> DataflowPlan:
        if len(self._plans) >= _PLANS:
            self._plans = {(): self._plans[()]}
        plan = self._plans[key] = self._graph.plan(requested, on_device)
        return plan


def _labels(config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> Mapping[str, Sequence[str]]:
    """Return the labels of the models that write the ensemble's outputs."""
    given = {
        tensor: others[dependency_of(step)].labels[output]
        for step in config.ensemble_scheduling.step
        for output, tensor in step.output_map.items()
        if output in others[dependency_of(step)].labels
    }
    return {output.name: given[output.name] for output in config.output if output.name in given}
