"""One request in the graph: its tensors, its running steps, and its answers. Event loop only."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
_NONE_UNREAD: deque[Any] = deque(maxlen=0)
_NO_STEPS: dict[int, Any] = {}
#: Parameters of a step's response that later steps get as their sequence.
_SEQUENCE = ("sequence_id", "sequence_start", "sequence_end")


class Item:
    """One item of a stream: the request itself, or one response of a decoupled step, which ``source`` requested.

    ``values`` has the tensors that a step still needs. ``open`` counts what keeps the source from going on: running
    steps, and a response that the caller has not read.
    """

    __slots__ = ("calls", "missing", "open", "sequences", "skipped", "source", "stream", "uses", "values", "waits")

    def __init__(self, plan: DataflowPlan, stream: int, source: Ticket | None) -> None:
        self.stream, self.source = stream, source
        self.values: list[Any] = plan.empty.copy()
        self.waits, self.uses = plan.waits.copy(), plan.uses.copy()
        self.calls: dict[int, Ticket] = {}
        self.missing = plan.missing
        self.open = 0
        #: By tensor, the sequence parameters of the response that brought it. None until a response has some.
        self.sequences: dict[int, dict[str, Any]] | None = None
        #: By tensor, why the step that writes it has not run. None if every step has run so far.
        self.skipped: dict[int, str] | None = None


class Dataflow:
    """Computes the request of ``ticket`` by ``plan``, and answers by ``answer``. ``name`` is the ensemble's."""

    __slots__ = (
        "_answer", "_callers", "_early", "_emitted", "_error", "_items", "_limit", "_name", "_plan", "_running",
        "_unread", "_waiting", "is_decoupled", "spans_ns", "ticket", "under_way",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        plan: DataflowPlan,
        ticket: Ticket,
        answer: Callable[[Ticket, Answer, bool], None],
        is_decoupled: bool,
        limit: int = 0,
    ) -> None:
        self.ticket, self.is_decoupled = ticket, is_decoupled
        self._name, self._plan, self._answer = name, plan, answer
        self._callers = plan.callers if not ticket.request.callers else (*ticket.request.callers, name)
        self._error: HeadraceError | None = None
        #: The compute times of the finished steps, added up: `headrace.Ticket.spans_ns`.
        self.spans_ns = _NO_TIME
        #: Steps that run or are about to, plus one while this object is busy.
        self.under_way = 0
        self._items: dict[Item, None] = {}
        self._emitted: list[tuple[Item, InferResponse]] = []
        #: The items of these that the caller has not read, if there may be several.
        self._unread: deque[Item] = deque() if is_decoupled else _NONE_UNREAD
        #: Answers of a step with a single response, before its last.
        self._early: dict[tuple[Item, Step], list[Answer]] | None = None
        self._limit = limit
        #: For a limit of parallel items per step: the number that runs, and the ones that wait.
        self._running: dict[int, int] = {} if limit else _NO_STEPS
        self._waiting: dict[int, deque[tuple[Item, Step]]] = {} if limit else _NO_STEPS

    def start(self) -> None:
        """Run the steps that need only the request."""
        plan = self._plan
        item = Item(plan, 0, None)
        item.open = 1  # until its end
        self._items[item] = None
        given, values = self.ticket.request.inputs, item.values
        for name, tensor in plan.inputs:
            values[tensor] = given.get(name)
        self.under_way = 1
        if not (plan.missing or plan.stream):
            self._emit(item)
        self._run(item, plan.first.copy())
        self.under_way -= 1
        if self._emitted or not self.under_way:
            self._settle()

    def cancel(self, error: HeadraceError) -> None:
        """Stop, because the request was cancelled. The scheduler drops later answers."""
        self._error = error
        self._cancel_calls()
        for index in self._waiting:
            self._admit(index)

    # ------------------------------------------------------------------ out

    def _run(self, item: Item, ready: list[Step]) -> None:
        """Run the ``ready`` steps, and those that become ready because one of them is skipped."""
        for step in ready:  # grows in the loop
            if self._error is not None:
                return
            if (step.when >= 0 or item.skipped is not None) and (why := self._why_not(item, step)):
                self._drop(item, step)
                item.skipped = item.skipped or {}
                item.skipped.update((tensor, why) for _, tensor, _ in step.writes)
                ready += self._put(item, step, {})
            elif self._limit and self._running.get(step.index, 0) >= self._limit:
                self._waiting.setdefault(step.index, deque()).append((item, step))
                item.open += 1
                self.under_way += 1
            else:
                self._launch(item, step)

    def _why_not(self, item: Item, step: Step) -> str:
        """Return why ``step`` does not run; empty if it does."""
        skipped = item.skipped or {}
        for tensor in step.required:
            if tensor in skipped:
                return skipped[tensor]
        if step.when < 0:
            return ""
        told = f"step {step.index} ('{step.name}') did not run"
        if step.when in skipped:
            return f"{told}, because {skipped[step.when]}"
        value = item.values[step.when]
        truths = set() if value is None else {bool(each) for each in on_host(value).flat}
        if len(truths) > 1:
            self._fail(InvalidArgument(f"the rows of the condition of step {step.index} ('{step.name}') differ"))
        return "" if truths == {not step.is_negated} else f"{told}, because its condition did not hold"

    def _drop(self, item: Item, step: Step) -> None:
        """Release the tensors that ``step`` no longer needs."""
        for tensor in step.uses:
            item.uses[tensor] -= 1
            if not item.uses[tensor]:
                item.values[tensor] = None

    def _launch(self, item: Item, step: Step) -> None:
        values, uses, inputs = item.values, item.uses, {}
        kind: tuple[Any, ...] | None = step.kind
        for name, tensor, adapt in step.reads:
            value = values[tensor]
            if value is not None:
                inputs[name] = value = value if adapt is None else adapt(value)
                if kind is not None:
                    kind += (name, value.dtype, value.shape)
        for tensor in step.uses:
            uses[tensor] -= 1
            if not uses[tensor]:
                values[tensor] = None
        request = self.ticket.request
        sequence_id, start, end = request.sequence_id, request.sequence_start, request.sequence_end
        if item.sequences is not None:
            sequence_id, start, end = self._sequence(item, step, sequence_id, start, end)
        asked = InferRequest(
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
        ticket = Ticket(asked, partial(self._heard_many if step.opens else self._heard, item, step))
        item.calls[step.index] = ticket
        if step.on_device:
            ticket.on_device = step.on_device
        if self._limit:
            self._running[step.index] = self._running.get(step.index, 0) + 1
        item.open += 1
        self.under_way += 1
        try:
            step.ask(ticket)
        except HeadraceError as error:
            self._fail(error)
            self._done(item, step)

    # ------------------------------------------------------------------ in

    def _heard(self, item: Item, step: Step, answer: Answer, final: bool) -> None:
        """Handle an answer of a step with a single response."""
        if not final or answer is None:
            self._heard_otherwise(item, step, answer, final)
            return
        if self._error is None:
            if isinstance(answer, InferResponse):
                if answer.parameters:
                    self._note_sequence(item, step, answer)
                if ready := self._put(item, step, answer.outputs):
                    self._run(item, ready)
            else:
                self._fail(answer)
        self._done(item, step)
        if self._emitted or not self.under_way:
            self._settle()

    def _heard_otherwise(self, item: Item, step: Step, answer: Answer, final: bool) -> None:
        """Handle an answer other than the single expected one."""
        self._early = self._early if self._early is not None else {}
        early = self._early.setdefault((item, step), [])
        if answer is not None:
            early.append(answer)
        if final:
            del self._early[item, step]
            self._heard(item, step, _single(early), True)

    def _heard_many(self, item: Item, step: Step, answer: Answer, final: bool) -> None:
        """Handle an answer of a decoupled step: each response is an item of its stream."""
        if isinstance(answer, HeadraceError):
            self._fail(answer)
        elif answer is not None:
            if self._error is None:
                made = Item(self._plan, step.opens, item.calls[step.index])
                self._items[made] = None
                made.open = 1
                if answer.parameters:
                    self._note_sequence(made, step, answer)
                if ready := self._put(made, step, answer.outputs):
                    self._run(made, ready)
                self._close(made)
            elif not final:
                item.calls[step.index].read()
        if final:
            self._done(item, step)
        self._settle()

    def _put(self, item: Item, step: Step, outputs: Mapping[str, Tensor]) -> list[Step]:
        """Keep ``outputs`` of ``step``. Return the steps that now have all their inputs."""
        values, waits = item.values, item.waits
        ready: list[Step] = []
        plan = self._plan
        for name, tensor, readers in step.writes:
            values[tensor] = outputs.get(name)
            if tensor in plan.output_tensors:
                item.missing -= 1
                if not item.missing:
                    self._emit(item)
            for reader in readers:
                if step.opens:
                    if not reader.waits and reader not in ready:
                        ready.append(reader)
                else:
                    waits[reader.index] -= 1
                    if not waits[reader.index]:
                        ready.append(reader)
        return ready

    def _done(self, item: Item, step: Step) -> None:
        spans = getattr(item.calls.pop(step.index), "spans_ns", None)
        if spans is not None:
            given = self.spans_ns
            if given is _NO_TIME:
                self.spans_ns = spans
            else:
                self.spans_ns = (given[0] + spans[0], given[1] + spans[1], given[2] + spans[2])
        if self._limit:
            self._running[step.index] -= 1
            self._admit(step.index)
        self.under_way -= 1
        if item.open > 1:
            item.open -= 1
        else:
            self._close(item)

    def _admit(self, index: int) -> None:
        """Start the next waiting item of a step, or drop all if the request has failed."""
        waiting = self._waiting.get(index)
        while waiting and (self._error is not None or self._running[index] < self._limit):
            item, step = waiting.popleft()
            if self._error is None:
                self._launch(item, step)
            self.under_way -= 1
            self._close(item)

    def _close(self, item: Item) -> None:
        """Remove one thing that keeps ``item`` open. If none is left, its source may go on."""
        item.open -= 1
        if not item.open:
            self._items.pop(item, None)
            if item.source is not None:
                item.source.read()

    # ------------------------------------------------------------------ to the caller

    def _emit(self, item: Item) -> None:
        """Make the response of ``item``, whose outputs are complete. It is sent when this object is no longer busy."""
        outputs: dict[str, Tensor] = {}
        values = item.values
        missing: list[str] = []
        for name, tensor, adapt in self._plan.outputs:
            value = values[tensor]
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
            item.uses[tensor] -= 1
            if not item.uses[tensor]:
                values[tensor] = None
        if missing and (self.ticket.request.outputs or not outputs):
            if not self.is_decoupled:
                self._fail(InvalidArgument(self.ticket.request.log_id + "; ".join(missing)))
            return
        request = self.ticket.request
        parameters: dict[str, Any] = {}
        if request.sequence_id:
            flags = request.sequence_start, request.sequence_end
            parameters = dict(zip(_SEQUENCE, (request.sequence_id, *flags), strict=True))
        if item.sequences is not None:
            for _, tensor, _ in self._plan.outputs:
                parameters |= item.sequences.get(tensor, {})
        if self.is_decoupled:
            item.open += 1
        self._emitted.append((item, InferResponse(outputs, parameters, id=request.id)))

    def _settle(self) -> None:
        """Send the responses, and the end if nothing is running."""
        emitted, is_over = self._emitted, not self.under_way
        ticket, answer = self.ticket, self._answer
        if self.is_decoupled:
            self._emitted = []
            last: Answer = None
            if is_over and emitted and self._error is None:
                item, last = emitted.pop()
                self._close(item)
            for item, response in emitted:
                self._unread.append(item)
                answer(ticket, response, False)
            if is_over:
                answer(ticket, self._error or last, True)
        elif is_over:
            self._emitted = []  # the response must not outlive its sending
            answer(ticket, self._error or (emitted[0][1] if emitted else self._deadlock()), True)

    def read(self, ticket: Ticket) -> None:
        """Note that the caller has read a response."""
        if self._unread:
            self._close(self._unread.popleft())

    def _deadlock(self) -> HeadraceError:
        return InvalidArgument(
            f"in ensemble '{self._name}', {self.ticket.request.log_id}unexpected deadlock, at least one output is not "
            "set while no more ensemble steps can be made"
        )

    def _fail(self, error: HeadraceError) -> None:
        """Stop after a failed step. The error is sent when the running steps are done."""
        if self._error is None:
            self._error = HeadraceError(f"in ensemble '{self._name}', {error.message}", error.code)
            self._cancel_calls()
            for index in self._waiting:
                self._admit(index)

    def _cancel_calls(self) -> None:
        for item in tuple(self._items):
            for ticket in tuple(item.calls.values()):
                ticket.cancel()

    # ------------------------------------------------------------------ sequences

    def _note_sequence(self, item: Item, step: Step, response: InferResponse) -> None:
        """Keep the sequence parameters of ``response`` with its tensors."""
        said = {key: response.parameters[key] for key in _SEQUENCE if key in response.parameters}
        if said:
            item.sequences = item.sequences or {}
            for _, tensor, _ in step.writes:
                item.sequences[tensor] = said

    def _sequence(self, item: Item, step: Step, *own: Any) -> Any:
        """Return the sequence for ``step``: from its tensors, else from the caller."""
        assert item.sequences is not None
        said: dict[str, Any] = {}
        for _, tensor, _ in step.reads:
            said |= item.sequences.get(tensor, {})
        return [said.get(key, default) for key, default in zip(_SEQUENCE, own, strict=True)]


def _single(answers: Sequence[Answer]) -> Answer:
    """Return the single answer of ``answers``; an error has priority."""
    for answer in answers:
        if isinstance(answer, HeadraceError):
            return answer
    return answers[0] if len(answers) == 1 else InternalError(f"expected a single response, got {len(answers)}")
