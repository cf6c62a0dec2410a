"""One request in the graph: its tensors, its running steps, and its answer. Event loop only.

`headrace_ensemble.streamed_dataflow` has the requests with decoupled steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from headrace import (
    Answer,
    HeadraceError,
    InferRequest,
    InferResponse,
    InternalError,
    InvalidArgument,
    Tensor,
    Ticket,
    on_host,
)
from headrace_ensemble.plan import DataflowPlan, Step

log = logging.getLogger("headrace.ensemble")

_NO_TIME = 0, 0, 0
_NO_PARAMETERS: Mapping[str, Any] = MappingProxyType({})
#: Parameters of a step's response that later steps get as their sequence.
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


class Item:
    """The tensors and the running steps of a request, or of one response of a decoupled step.

    ``values`` has the tensors that a step or the caller still needs. ``calls`` has the running steps by index.
    """

    __slots__ = ("calls", "missing", "sequences", "skipped", "uses", "values", "waits")

    def __init__(self, plan: DataflowPlan) -> None:
        self.values: list[Any] = plan.empty.copy()
        self.waits, self.uses = plan.waits and plan.waits.copy(), plan.uses and plan.uses.copy()
        self.missing = plan.missing
        self.calls: dict[int, Ticket] = {}
        #: By tensor, the sequence parameters of the response that brought it. None until a response has some.
        self.sequences: dict[int, dict[str, Any]] | None = None
        #: By tensor, why the step that writes it has not run. None if every step has run so far.
        self.skipped: dict[int, str] | None = None


class Dataflow(Item):
    """Computes the request of ``ticket`` by ``plan``, and answers by ``answer``."""

    __slots__ = (
        "_answer", "_callers", "_early", "_error", "_plan", "_response", "_under_way", "spans_ns", "ticket",
    )  # fmt: skip

    def __init__(self, plan: DataflowPlan, ticket: Ticket, answer: Callable[[Ticket, Answer, bool], None]) -> None:
        Item.__init__(self, plan)  # `super` would cost a call more
        self.ticket, self._plan, self._answer = ticket, plan, answer
        callers = ticket.request.callers
        self._callers = (*callers, *plan.callers) if callers else plan.callers
        self._error: HeadraceError | None = None
        self._response: InferResponse | None = None
        #: The compute times of the finished steps, added up: `headrace.Ticket.spans_ns`.
        self.spans_ns = _NO_TIME
        #: Steps that run or are about to, plus one while the first ones are started.
        self._under_way = 1
        #: Answers of a step with a single response, before its last.
        self._early: dict[tuple[Item, Step], list[Answer]] | None = None

    def start(self) -> None:
        """Run the steps that need only the request."""
        plan, given, values = self._plan, self.ticket.request.inputs, self.values
        for name, tensor in plan.inputs:
            values[tensor] = given.get(name)
        if not (plan.missing or plan.stream):
            self._emit(self)
        self._run(self, plan.first.copy())
        self._under_way -= 1
        if not self._under_way:
            self._settle()

    def cancel(self, error: HeadraceError) -> None:
        """Stop, because the request was cancelled. The scheduler drops later answers."""
        self._error = error
        self._cancel_calls()

    # ------------------------------------------------------------------ out

    def _run(self, item: Item, ready: list[Step]) -> None:
        """Run the ``ready`` steps, and those that become ready because one of them is skipped."""
        for step in ready:  # grows in the loop
            if self._error is not None:
                return
            if (step.when < 0 and item.skipped is None) or not (why := self._why_not(item, step)):
                self._launch(item, step)
                continue
            _release(item, step)
            item.skipped = item.skipped or {}
            item.skipped.update((tensor, why) for _, tensor in step.writes)
            ready += self._put(item, step, {})

    def _why_not(self, item: Item, step: Step) -> str:
        """Return why ``step`` does not run; empty if it does."""
        skipped = item.skipped or {}
        for tensor in step.required:
            if tensor in skipped:
                return skipped[tensor]
        if step.when < 0:
            return ""
        prefix = f"step {step.index} ('{step.name}') did not run"
        if step.when in skipped:
            return f"{prefix}, because {skipped[step.when]}"
        value = item.values[step.when]
        truths = set() if value is None else {bool(each) for each in on_host(value).flat}
        if len(truths) > 1:
            self._fail(InvalidArgument(f"the rows of the condition of step {step.index} ('{step.name}') differ"))
        return "" if truths == {not step.is_negated} else f"{prefix}, because its condition did not hold"

    def _launch(self, item: Item, step: Step) -> None:
        """Send the request of ``step`` to its model."""
        values, inputs = item.values, {}
        kind: tuple[Any, ...] | None = step.kind
        for name, tensor, adapt in step.reads:
            value = values[tensor]
            if value is not None:
                inputs[name] = value = value if adapt is None else adapt(value)
                if kind is not None:
                    kind += (name, value.dtype, value.shape)
        for tensor in step.drops:
            values[tensor] = None
        if step.shares:
            _release(item, step)
        request = self.ticket.request
        sequence_id, start, end = request.sequence_id, request.sequence_start, request.sequence_end
        if item.sequences is not None:
            sequence_id, start, end = _sequence(item.sequences, step, sequence_id, start, end)
        sent = InferRequest(
            step.name,
            inputs,
            step.outputs,
            request.id,
            step.version,
            request.parameters,
            request.priority,
            request.timeout_us,
            sequence_id,
            start,
            end,
            self._callers,
            request,
            step.opens > 0,
            kind,
        )
        item.calls[step.index] = ticket = Ticket(sent, partial(self._received, item, step))
        if step.on_device:
            ticket.on_device = step.on_device
        self._under_way += 1
        try:
            step.ask(ticket)
        except HeadraceError as error:
            self._fail(error)
            self._done(item, step)

    # ------------------------------------------------------------------ in

    def _received(self, item: Item, step: Step, answer: Answer, final: bool) -> None:
        """Handle an answer of a step with a single response."""
        if not final or answer is None:
            self._received_early(item, step, answer, final)
            return
        if isinstance(answer, HeadraceError):
            self._fail(answer)
        elif self._error is None:
            if answer.parameters:
                note_sequence(item, step, answer)
            if ready := self._put(item, step, answer.outputs):
                self._run(item, ready)
        self._done(item, step)
        if not self._under_way:
            self._settle()

    def _received_early(self, item: Item, step: Step, answer: Answer, final: bool) -> None:
        """Handle an answer other than the single expected one."""
        self._early = self._early if self._early is not None else {}
        early = self._early.setdefault((item, step), [])
        if answer is not None:
            early.append(answer)
        if final:
            del self._early[item, step]
            self._received(item, step, _single(early), True)

    def _put(self, item: Item, step: Step, outputs: Mapping[str, Tensor]) -> list[Step]:
        """Keep ``outputs`` of ``step``. Return the steps that now have all their inputs."""
        for name, tensor in step.writes:
            item.values[tensor] = outputs.get(name)
        if step.completes:
            item.missing -= step.completes
            if not item.missing:
                self._emit(item)
        ready = step.starts.copy()
        for reader in step.helps:
            item.waits[reader.index] -= 1
            if not item.waits[reader.index]:
                ready.append(reader)
        return ready

    def _done(self, item: Item, step: Step) -> None:
        """Note that ``step`` has its last answer."""
        stacking, inferring, splitting = getattr(item.calls.pop(step.index), "spans_ns", _NO_TIME)
        before = self.spans_ns
        self.spans_ns = before[0] + stacking, before[1] + inferring, before[2] + splitting
        self._under_way -= 1

    # ------------------------------------------------------------------ to the caller

    def _emit(self, item: Item) -> None:
        """Make the response of ``item``, whose outputs are complete."""
        outputs: dict[str, Tensor] = {}
        missing: list[str] = []
        for name, tensor, adapt in self._plan.outputs:
            value = item.values[tensor]
            if value is None:  # the step that writes it has not
                log.debug("Composing models did not output tensor %s", name)
                if item.skipped is not None and tensor in item.skipped:
                    missing.append(f"output '{name}' was not written: {item.skipped[tensor]}")
                continue
            try:
                outputs[name] = value if adapt is None else adapt(value)
            except HeadraceError as error:
                self._fail(error)
                return
        request = self.ticket.request
        if missing and (request.outputs or not outputs):
            self._incomplete(missing)
            return
        parameters = _NO_PARAMETERS
        if request.sequence_id:
            flags = request.sequence_start, request.sequence_end
            parameters = dict(zip(_SEQUENCE, (request.sequence_id, *flags), strict=True))
        if item.sequences is not None:
            parameters = {**parameters, **_sequence_parameters(item.sequences, self._plan.outputs)}
        self._response = InferResponse(outputs, parameters, id=request.id)

    def _incomplete(self, missing: Iterable[str]) -> None:
        """Note that the caller gets no response, because requested outputs are ``missing``."""
        self._fail(InvalidArgument(self.ticket.request.log_id + "; ".join(missing)))

    def _settle(self) -> None:
        """Answer: no step is running."""
        self._answer(self.ticket, self._error or self._response or self._deadlock(), True)

    def _deadlock(self) -> HeadraceError:
        return InvalidArgument(
            f"in ensemble '{self._plan.callers[0]}', {self.ticket.request.log_id}unexpected deadlock, at least one "
            "output is not set while no more ensemble steps can be made"
        )

    def _fail(self, error: HeadraceError) -> None:
        """Stop after a failed step. The error is sent when the running steps are done."""
        if self._error is None:
            self._error = HeadraceError(f"in ensemble '{self._plan.callers[0]}', {error.message}", error.code)
            self._cancel_calls()

    def _cancel_calls(self) -> None:
        for ticket in tuple(self.calls.values()):
            ticket.cancel()


def _release(item: Item, step: Step) -> None:
    """Release the tensors that ``step`` no longer needs."""
    for tensor in step.drops:
        item.values[tensor] = None
    for tensor in step.shares:
        item.uses[tensor] -= 1
        if not item.uses[tensor]:
            item.values[tensor] = None


def note_sequence(item: Item, step: Step, response: InferResponse) -> None:
    """Keep the sequence parameters of ``response`` with its tensors."""
    parameters = {key: response.parameters[key] for key in _SEQUENCE if key in response.parameters}
    if parameters:
        item.sequences = item.sequences or {}
        item.sequences.update((tensor, parameters) for _, tensor in step.writes)


def _sequence(sequences: Mapping[int, Mapping[str, Any]], step: Step, *own: Any) -> Any:
    """Return the sequence for ``step``: from its tensors, else from the caller."""
    parameters = _sequence_parameters(sequences, step.reads)
    return [parameters.get(key, default) for key, default in zip(_SEQUENCE, own, strict=True)]


def _sequence_parameters(
    sequences: Mapping[int, Mapping[str, Any]], tensors: Iterable[tuple[str, int, Any]]
) -> dict[str, Any]:
    """Return the sequence parameters that arrived with ``tensors``."""
    parameters: dict[str, Any] = {}
    for _, tensor, _ in tensors:
        parameters |= sequences.get(tensor, {})
    return parameters


def _single(answers: Sequence[Answer]) -> Answer:
    """Return the single answer of ``answers``; an error has priority."""
    for answer in answers:
        if isinstance(answer, HeadraceError):
            return answer
    return answers[0] if len(answers) == 1 else InternalError(f"expected a single response, got {len(answers)}")
