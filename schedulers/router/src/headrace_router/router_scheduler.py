"""The scheduler ``router``: no instances; each request is answered by one of the targets, chosen when it arrives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from headrace import (
    Answer,
    Code,
    Dependency,
    FullScheduler,
    HeadraceError,
    InferRequest,
    InferResponse,
    InstanceInfo,
    ModelConfig,
    OtherModel,
    Problem,
    PublishedMetric,
    SchedulerContext,
    Ticket,
)
from headrace_router.decisions import Decider
from headrace_router.routing_table import RouterParameters, RouteTarget, read_table, table_problems
from headrace_router.signatures import complete
from headrace_router.windows import SlidingWindow

#: The parameters of each response: the target that gave it, and why it was chosen.
TARGET, ROUTED_BY = "headrace_target", "headrace_routed_by"
_WINDOW_NS = 60_000_000_000

REQUESTS = "headrace_router_requests_total"
ERRORS = "headrace_router_errors_total"
DECISIONS = "headrace_router_decisions_total"
WEIGHT = "headrace_router_weight"

#: The routers of all servers of this process, by the ``id`` of their configs, which they keep.
_ROUTERS: WeakValueDictionary[int, RouterScheduler] = WeakValueDictionary()


def router_of(config: ModelConfig) -> RouterScheduler | None:
    """Return the router of the loaded version with ``config``; None if it is none."""
    return _ROUTERS.get(id(config))


class Destination:
    """A target while it is served: how it is asked, and what became of its requests."""

    __slots__ = ("alike", "ask", "errors", "label", "name", "outputs", "requests", "target", "version", "window")

    def __init__(self, target: RouteTarget, other: OtherModel, outputs: Collection[str], window_ns: int) -> None:
        self.target, self.label = target, target.label
        self.name, self.version, self.ask = target.dependency.model, target.version, other.ask
        #: The outputs that the router has, if the target has more.
        self.outputs = () if set(other.outputs) == set(outputs) else tuple(outputs)
        #: See `headrace.InferRequest.alike`: requests to different targets are not alike.
        self.alike = object()
        self.requests = self.errors = 0
        self.window = SlidingWindow(window_ns)

    def status(self, now_ns: int) -> dict[str, Any]:
        total = self.window.total(now_ns)
        return {
            "requests": self.requests,
            "errors": self.errors,
            "window": {
                "requests": total.requests,
                "error_rate": round(total.error_rate, 6),
                "p99_us": total.percentile_ns(0.99) // 1000,
            },
        }


class RouterScheduler(FullScheduler):
    """Lets the target answer that the routing table chooses."""

    name: ClassVar[str] = "router"
    Parameters = RouterParameters
    needs_instances: ClassVar[bool] = False
    metrics: ClassVar[Sequence[PublishedMetric]] = (
        PublishedMetric(REQUESTS, "Requests that a target has answered.", "counter", label="target"),
        PublishedMetric(ERRORS, "Requests that a target has answered by an error.", "counter", label="target"),
        PublishedMetric(DECISIONS, "Requests by what has decided about the target.", "counter", label="by"),
        PublishedMetric(WEIGHT, "The weight of a target; its share is this over the sum of all.", label="target"),
    )

    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        return table_problems(config)

    @classmethod
    def depends_on(cls, config: ModelConfig) -> Collection[Dependency]:
        return {target.dependency for target in read_table(config).targets}

    @classmethod
    def complete_config(cls, config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> None:
        complete(config, read_table(config).targets, others)

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(context)
        config = context.config
        self.table = read_table(config)
        #: The targets as the config has them: a change of weights belongs to them.
        self.written = config.parameters["scheduler.targets"].string_value
        self.decider = Decider(self.table, _idle_ns(context.others.values()))
        self.destinations = [
            Destination(target, context.others[target.dependency], context.outputs, _WINDOW_NS)
            for target in self.table.targets
        ]
        self._name, self._callers, self._answer, self._now_ns = (
            config.name,
            (config.name,),
            context.answer,
            context.clock.now_ns,
        )
        self._is_decoupled = config.model_transaction_policy.decoupled
        self._under_way: dict[Ticket, tuple[Ticket, Destination]] = {}
        baseline = context.others[self.table.targets[0].dependency]
        self.labels = {name: lines for name, lines in baseline.labels.items() if name in context.outputs}
        _ROUTERS[id(config)] = self

    def submit(self, ticket: Ticket) -> int:
        request = ticket.request
        index, why = self.decider.decide(request, ticket.queued_ns)
        destination = self.destinations[index]
        asked = InferRequest(
            destination.name,
            request.inputs,
            request.outputs or destination.outputs,
            request.id,
            destination.version,
            request.parameters,
            request.priority,
            request.timeout_us,
            request.sequence_id,
            request.sequence_start,
            request.sequence_end,
            self._callers if not request.callers else (*request.callers, self._name),
            request,
            self._is_decoupled,
            None if request.alike is None else (destination.alike, request.alike),
        )
        call = Ticket(asked, partial(self._told, ticket, destination, why))
        self._under_way[ticket] = call, destination
        ticket.started_ns = ticket.queued_ns  # a request waits only in its target, which counts the time
        if self._is_decoupled:
            ticket.on_read = partial(_pass_on_read, call)
        try:
            destination.ask(call)
        except HeadraceError as error:
            self._told(ticket, destination, why, error, True)
        return 0

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket]:
        raise AssertionError("a router has no instances")

    def _told(self, ticket: Ticket, destination: Destination, why: str, answer: Answer, final: bool) -> None:
        """Pass on an answer of the target, unless the caller has the last one already: see `finished`."""
        if ticket not in self._under_way:
            return
        if isinstance(answer, InferResponse):
            said = {**answer.parameters, TARGET: destination.label, ROUTED_BY: why}
            answer = InferResponse(answer.outputs, said, id=answer.id)
        if final:
            call, _ = self._under_way.pop(ticket)
            spans_ns = getattr(call, "spans_ns", None)
            if spans_ns is not None:
                ticket.spans_ns = spans_ns
            is_error = isinstance(answer, HeadraceError) and answer.code is not Code.CANCELLED
            self._count(ticket, destination, is_error)
        self._answer(ticket, answer, final)

    def _count(self, ticket: Ticket, destination: Destination, is_error: bool) -> None:
        now_ns = self._now_ns()
        destination.requests += 1
        destination.errors += is_error
        destination.window.add(now_ns, now_ns - ticket.queued_ns, is_error)

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        """Cancel what was asked for cancelled requests. The time that they waited counts, and no error."""
        for ticket in tickets:
            call, destination = self._under_way.pop(ticket, (None, None))
            if call is not None and destination is not None:
                self._count(ticket, destination, is_error=False)
                call.cancel()

    def continues(self, ticket: Ticket) -> bool:
        return self.decider.is_running(ticket.request)

    # ------------------------------------------------------------------ changed and shown

    def apply(self, change: Mapping[str, Any]) -> None:
        """Apply a change that was checked: ``weights``, in the order of the targets."""
        self.decider.change_weights(change["weights"])

    def status(self) -> dict[str, Any]:
        """Return the targets with their weights and counts, as JSON."""
        now_ns, decider = self._now_ns(), self.decider
        rows = zip(self.destinations, decider.weights, decider.shares(), strict=True)
        return {
            "targets": [
                {"name": each.label, "weight": weight, "share": round(share, 6), **each.status(now_ns)}
                for each, weight, share in rows
            ],
            "decided_by": dict(decider.counts),
        }

    def measure(self) -> Mapping[str, Any]:
        return {
            REQUESTS: {each.label: each.requests for each in self.destinations},
            ERRORS: {each.label: each.errors for each in self.destinations},
            DECISIONS: dict(self.decider.counts),
            WEIGHT: dict(zip(self.table.labels, self.decider.weights, strict=True)),
        }


def _pass_on_read(call: Ticket, ticket: Ticket) -> None:
    call.read()


def _idle_ns(others: Collection[OtherModel]) -> int:
    """Return after how many ns without a request no target knows a sequence any more; 0 if none has sequences."""
    idle_us = [
        other.config.sequence_batching.max_sequence_idle_microseconds
        for other in others
        if other.config.HasField("sequence_batching")
    ]
    return (2 * max(idle_us) + 1_000_000) * 1000 if idle_us else 0
