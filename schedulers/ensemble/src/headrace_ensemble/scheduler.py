"""The scheduler of ensembles: no instances; every request is a `Dataflow` through other models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

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
        self._answer, self._on_answer = context.answer, self._finish
        self._dataflow = Dataflow
        if config.model_transaction_policy.decoupled:
            from headrace_ensemble.streamed_dataflow import StreamedDataflow  # few ensembles need it

            self._dataflow = StreamedDataflow
        self._graph = EnsembleGraph(config, context.others)
        self.takes_device_tensors = self._graph.takes_device_tensors
        #: The plan for all outputs, and those for the ones that a request names.
        self._whole = self._graph.plan()
        self._plans: dict[tuple[object, ...], DataflowPlan] = {}
        self._under_way: dict[Ticket, Dataflow] = {}
        self.labels = _labels(config, context.others)

    def submit(self, ticket: Ticket) -> int:
        plan = self._whole
        if ticket.request.outputs or self.takes_device_tensors is not None:
            plan = self._plan_for(ticket)
        self._under_way[ticket] = flow = self._dataflow(plan, ticket, self._on_answer)
        ticket.started_ns = ticket.queued_ns  # a request waits only in steps, which count the time
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
        if not final:
            if ticket in self._under_way:
                self._answer(ticket, answer, False)
        elif (flow := self._under_way.pop(ticket, None)) is not None:
            ticket.spans_ns = flow.spans_ns
            self._answer(ticket, answer, True)

    def _plan_for(self, ticket: Ticket) -> DataflowPlan:
        """Return the plan for the outputs that ``ticket`` names, and for those that it takes on a device."""
        outputs, on_device = ticket.request.outputs, getattr(ticket, "on_device", _NOWHERE)
        key = (*outputs, *on_device.items())
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._graph.plan(outputs, on_device)
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
