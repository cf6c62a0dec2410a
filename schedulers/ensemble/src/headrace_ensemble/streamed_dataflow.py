"""One request in a graph with decoupled steps: each of their responses goes through the graph by itself.

Event loop only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from headrace import Answer, HeadraceError, InferResponse, Ticket
from headrace_ensemble.dataflow import Dataflow, Item, note_sequence
from headrace_ensemble.plan import DataflowPlan, Step


class StreamedItem(Item):
    """One response of a decoupled step, which ``source`` requested.

    ``open`` counts what keeps the source from going on: steps that run or wait, and a response that the caller has not
    read.
    """

    __slots__ = ("open", "source")

    def __init__(self, plan: DataflowPlan, source: Ticket) -> None:
        super().__init__(plan)
        self.source, self.open = source, 1


class StreamedDataflow(Dataflow):
    """A `Dataflow` with any number of responses. ``plan.limit`` items at most run in a step at a time; 0: no limit."""

    __slots__ = ("_emitted", "_items", "_running", "_unread", "_waiting")

    def __init__(self, plan: DataflowPlan, ticket: Ticket, answer: Callable[[Ticket, Answer, bool], None]) -> None:
        super().__init__(plan, ticket, answer)
        ticket.on_read = self._read
        self._items: dict[StreamedItem, None] = {}
        self._emitted: list[tuple[Item, InferResponse]] = []
        #: The items of the responses that the caller has not read.
        self._unread: deque[Item] = deque()
        #: By step: how many items run in it, and those that wait because of the limit.
        self._running: dict[Step, int] = {}
        self._waiting: dict[Step, deque[Item]] = {}

    # ------------------------------------------------------------------ steps

    def _launch(self, item: Item, step: Step) -> None:
        self._hold(item)
        limit, running = self._plan.limit, self._running.get(step, 0)
        if limit and running >= limit:
            self._waiting.setdefault(step, deque()).append(item)
            self._under_way += 1
        else:
            self._running[step] = running + 1
            super()._launch(item, step)

    def _received(self, item: Item, step: Step, answer: Answer, final: bool) -> None:
        if step.opens:
            self._received_many(item, step, answer, final)
        else:
            super()._received(item, step, answer, final)
        if self._emitted:
            self._settle()

    def _received_many(self, item: Item, step: Step, answer: Answer, final: bool) -> None:
        """Handle an answer of a decoupled step: each response is an item of its stream."""
        if isinstance(answer, HeadraceError):
            self._fail(answer)
        elif answer is not None:
            if self._error is None:
                made = StreamedItem(self._plan, item.calls[step.index])
                self._items[made] = None
                if answer.parameters:
                    note_sequence(made, step, answer)
                self._run(made, self._put(made, step, answer.outputs))
                self._close(made)
            elif not final:
                item.calls[step.index].read()
        if final:
            self._done(item, step)
            if not self._under_way:
                self._settle()

    def _done(self, item: Item, step: Step) -> None:
        super()._done(item, step)
        self._running[step] -= 1
        self._admit(step)
        self._close(item)

    def _admit(self, step: Step) -> None:
        """Start the next waiting item of ``step``, or drop all if the request has failed."""
        waiting = self._waiting.get(step)
        while waiting and (self._error is not None or self._running[step] < self._plan.limit):
            item = waiting.popleft()
            if self._error is None:
                self._launch(item, step)
            self._under_way -= 1
            self._close(item)

    def _cancel_calls(self) -> None:
        super()._cancel_calls()
        for item in tuple(self._items):
            for ticket in tuple(item.calls.values()):
                ticket.cancel()
        for step in self._waiting:
            self._admit(step)

    # ------------------------------------------------------------------ to the caller

    def _emit(self, item: Item) -> None:
        """Make the response of ``item``. It is sent when this object is no longer busy."""
        super()._emit(item)
        if self._response is not None:
            self._hold(item)
            self._emitted.append((item, self._response))
            self._response = None
            item.values.clear()  # no step needs any: all that the outputs need has run

    def _incomplete(self, missing: Iterable[str]) -> None:
        """Leave out a response: others may have the requested outputs."""

    def _settle(self) -> None:
        """Send the responses, and the end if nothing is running."""
        emitted, self._emitted = self._emitted, []
        is_over, last = not self._under_way, None
        if is_over and emitted and self._error is None:
            item, last = emitted.pop()
            self._close(item)
        for item, response in emitted:
            self._unread.append(item)
            self._answer(self.ticket, response, False)
        if is_over:
            self._answer(self.ticket, self._error or last, True)

    def _read(self, ticket: Ticket) -> None:
        """Note that the caller has read a response."""
        if self._unread:
            self._close(self._unread.popleft())

    # ------------------------------------------------------------------ items

    def _hold(self, item: Item) -> None:
        """Add one thing that keeps ``item`` open. The request itself needs no count."""
        if isinstance(item, StreamedItem):
            item.open += 1

    def _close(self, item: Item) -> None:
        """Remove one thing that keeps ``item`` open. If none is left, its source may go on."""
        if isinstance(item, StreamedItem):
            item.open -= 1
            if not item.open:
                del self._items[item]
                item.source.read()
