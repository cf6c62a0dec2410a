"""The scheduler ``router``: no instances; each request is answered by one of the targets, chosen when it arrives."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from time import time
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict
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
    Measured,
    ModelConfig,
    OtherModel,
    Problem,
    PublishedMetric,
    SchedulerContext,
    Ticket,
)
from headrace_router.router_metrics import METRICS, measure, status
from headrace_router.table_parameters import RouterParameters, read_table, table_problems

if TYPE_CHECKING:
    from headrace_router.decisions import RolledBack
    from headrace_router.destination import Destination
    from headrace_router.shadow import Copy, Shadow

log = logging.getLogger("headrace.router")

#: The parameters of each response: the target that gave it, and why it was chosen.
TARGET, ROUTED_BY = "headrace_target", "headrace_routed_by"

#: Targets are judged at most ten times a second.
_JUDGE_NS = 100_000_000
_NEVER_NS = 1 << 63


class RouterState(TypedDict):
    """What a change sets, as JSON: weights in the order of the targets, the fraction of the shadow, and rollbacks."""

    weights: list[float]
    shadow: float | None
    rolled_back: dict[str, RolledBack]


#: The routers of all servers of this process, by the ``id`` of their configs, which they keep.
_ROUTERS: WeakValueDictionary[int, RouterScheduler] = WeakValueDictionary()


def router_of(config: ModelConfig) -> RouterScheduler | None:
    """Return the router of the loaded version with ``config``; None if it is none."""
    return _ROUTERS.get(id(config))


class RouterScheduler(FullScheduler):
    """Lets the target answer that the routing table chooses."""

    name: ClassVar[str] = "router"
    Parameters = RouterParameters
    needs_instances: ClassVar[bool] = False
    metrics: ClassVar[Sequence[PublishedMetric]] = METRICS

    @classmethod
    def check_config(cls, config: ModelConfig, *, completed: bool) -> Iterable[Problem]:
        return table_problems(config)

    @classmethod
    def depends_on(cls, config: ModelConfig) -> Collection[Dependency]:
        return read_table(config).dependencies

    @classmethod
    def complete_config(cls, config: ModelConfig, others: Mapping[Dependency, OtherModel]) -> None:
        from headrace_router.signatures import complete

        complete(config, read_table(config), others)

    def __init__(self, context: SchedulerContext) -> None:
        from headrace_router.decisions import Decider
        from headrace_router.destination import Destination
        from headrace_router.shadow import Shadow

        super().__init__(context)
        config, others = context.config, context.others
        self.table = table = read_table(config)
        #: The targets as the config has them: a change of weights belongs to them.
        self.written = config.parameters["scheduler.targets"].string_value
        self.decider = Decider(table, _idle_ns(others.values()))
        self.destinations = [
            Destination(target, others[target.dependency], context.outputs, table.rollback.window_ns)
            for target in table.targets
        ]
        self.shadow: Shadow | None = None
        if table.shadow is not None:
            target, fraction = table.shadow
            self.shadow = Shadow(config.name, target, others[target.dependency], fraction, table.tolerance)
        #: Called when this router has rolled back a target.
        self.on_rollback: Callable[[RouterScheduler], None] | None = None
        self._name, self._callers = config.name, (config.name,)
        self._answer, self._now_ns = context.answer, context.clock.now_ns
        self._is_decoupled = config.model_transaction_policy.decoupled
        self._in_flight: dict[Ticket, tuple[Ticket, Destination]] = {}
        #: The requests of which the shadow gets a copy.
        self._copies: dict[Ticket, Copy] = {}
        self._judge_ns = 0 if table.rollback.is_on else _NEVER_NS
        baseline = others[table.targets[0].dependency]
        self.labels = {name: lines for name, lines in baseline.labels.items() if name in context.outputs}
        _ROUTERS[id(config)] = self

    def submit(self, ticket: Ticket) -> int:
        request = ticket.request
        index, why = self.decider.decide(request, ticket.queued_ns)
        destination = self.destinations[index]
        forwarded = InferRequest(
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
        call = Ticket(forwarded, partial(self._answered, ticket, destination, why))
        self._in_flight[ticket] = call, destination
        ticket.started_ns = ticket.queued_ns  # a request waits only in its target, which counts the time
        if self._is_decoupled:
            ticket.on_read = partial(_pass_on_read, call)
        shadow = self.shadow
        if shadow is not None and shadow.label != destination.label and not request.is_in_sequence:
            copy = shadow.take(request)
            if copy is not None:
                self._copies[ticket] = copy
        try:
            destination.ask(call)
        except HeadraceError as error:
            self._answered(ticket, destination, why, error, True)
        return 0

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket]:
        raise AssertionError("a router has no instances")

    def _answered(self, ticket: Ticket, destination: Destination, why: str, answer: Answer, final: bool) -> None:
        """Forward an answer of the target, unless the caller already has its last one: see `finished`."""
        if ticket not in self._in_flight:
            return
        if isinstance(answer, InferResponse):
            parameters = {**answer.parameters, TARGET: destination.label, ROUTED_BY: why}
            answer = InferResponse(answer.outputs, parameters, id=answer.id)
        if not final:
            self._answer(ticket, answer, False)
            return
        call, _ = self._in_flight.pop(ticket)
        spans_ns = getattr(call, "spans_ns", None)
        if spans_ns is not None:
            ticket.spans_ns = spans_ns
        now_ns = self._now_ns()
        is_error = isinstance(answer, HeadraceError) and answer.code is not Code.CANCELLED
        destination.requests += 1
        destination.errors += is_error
        destination.window.add(now_ns, now_ns - ticket.queued_ns, is_error)
        if self._copies and (copy := self._copies.pop(ticket, None)) is not None and self.shadow is not None:
            self._answer_and_copy(self.shadow, copy, ticket, answer)
        else:
            self._answer(ticket, answer, True)
        if now_ns >= self._judge_ns:
            self._judge(now_ns)

    def _answer_and_copy(self, shadow: Shadow, copy: Copy, ticket: Ticket, answer: Answer) -> None:
        """Answer ``ticket``, then send its copy to the shadow."""
        if not isinstance(answer, InferResponse):
            self._answer(ticket, answer, True)
            shadow.release(copy)
            return
        outputs = shadow.keep(copy, answer.outputs)
        self._answer(ticket, answer, True)
        shadow.send(copy, outputs)

    def finished(self, tickets: Sequence[Ticket], answers: Sequence[Answer], instance: InstanceInfo | None) -> None:
        """Cancel the calls of cancelled requests. Their duration counts, but not as an error."""
        now_ns = self._now_ns()
        for ticket in tickets:
            found = self._in_flight.pop(ticket, None)
            if found is not None:
                call, destination = found
                destination.requests += 1
                destination.window.add(now_ns, now_ns - ticket.queued_ns, False)
                call.cancel()
            copy = self._copies.pop(ticket, None)
            if copy is not None and self.shadow is not None:
                self.shadow.release(copy)

    def continues(self, ticket: Ticket) -> bool:
        return self.decider.is_running(ticket.request)

    def close(self) -> None:
        if self.shadow is not None:
            self.shadow.close()

    # ------------------------------------------------------------------ changed while it serves

    def _judge(self, now_ns: int) -> None:
        """Roll back the targets that do worse than the baseline."""
        rule = self.table.rollback
        self._judge_ns = now_ns + max(rule.window_ns // 100, _JUDGE_NS)
        baseline = self.destinations[0].window.total(now_ns)
        for destination in self.destinations[1:]:
            if destination.label in self.decider.rolled_back:
                continue
            why = rule.why(destination.window.total(now_ns), baseline)
            if why:
                destination.rollbacks += 1
                log.warning("router '%s' rolls back target '%s': %s", self._name, destination.label, why)
                found: RolledBack = {"reason": why, "at": round(time(), 3)}
                rolled_back = {**self.decider.rolled_back, destination.label: found}
                self.decider.change(self.decider.configured_weights, rolled_back)
                if self.on_rollback is not None:
                    self.on_rollback(self)

    def state(self) -> RouterState:
        """Return what `apply` takes."""
        return {
            "weights": list(self.decider.configured_weights),
            "shadow": None if self.shadow is None else self.shadow.fraction,
            "rolled_back": dict(self.decider.rolled_back),
        }

    def apply(self, state: RouterState) -> None:
        """Split by the checked ``state``. Clear the windows of targets that are no longer rolled back."""
        for destination in self.destinations:
            if destination.label in self.decider.rolled_back and destination.label not in state["rolled_back"]:
                destination.window.clear()
        self.decider.change(state["weights"], state["rolled_back"])
        if self.shadow is not None and state["shadow"] is not None:
            self.shadow.fraction = state["shadow"]

    # ------------------------------------------------------------------ shown

    def measure(self) -> Mapping[str, Measured]:
        return measure(self.destinations, self.decider, self.shadow)

    def status(self) -> dict[str, Any]:
        """Return the present split, as JSON."""
        return status(self.destinations, self.decider, self.shadow, self._now_ns())


def _pass_on_read(call: Ticket, ticket: Ticket) -> None:
    call.read()


def _idle_ns(others: Collection[OtherModel]) -> int:
    """Return the ns without a request after which every target has removed a sequence; 0 without sequences."""
    idle_us = [
        other.config.sequence_batching.max_sequence_idle_microseconds
        for other in others
        if other.config.HasField("sequence_batching")
    ]
    return (2 * max(idle_us) + 1_000_000) * 1000 if idle_us else 0
