"""Drives instances that give any number of responses: in order (`StreamRunner`), or any time later
(`DeferredRunner`)."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Sequence
from time import monotonic_ns

from headrace.backends.base import Call, DeferredInstance, StreamInstance
from headrace.errors import BackendError, HeadraceError, Unavailable
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import LATER, Returned, Runner, as_error, cancelled
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import UNREAD, Ticket
from headrace.telemetry.executions import BatchTimes


class CreditWindow:
    """Limits how far the producer of one request's responses may be ahead of the reader.

    It counts the responses that are sent and not read, and stops the producer at `UNREAD`. A stopped producer goes on
    when half of them are read: waking it for each one would cost a thread switch per response.

    A finalizer may call `open` in the middle of any other call of its thread. So the gate is a bare lock. It is held
    while the producer waits, and is released in one step that cannot be interrupted.
    """

    __slots__ = ("_gate", "_is_open", "_read", "_sent", "_turn")

    def __init__(self) -> None:
        self._sent = 0  # written by the producer that holds ``_turn``
        self._read = 0  # written by the reader
        self._is_open = False
        self._turn = threading.Lock()
        self._gate = threading.Lock()

    @classmethod
    def over(cls, ticket: Ticket) -> CreditWindow:
        """Return a window for ``ticket``. Each response that the caller reads moves it; a disconnect opens it."""
        window = cls()
        ticket.on_read = lambda _: window.release()
        ticket.on_cancel = lambda _: window.open() if ticket.abandoned else None
        if ticket.abandoned:  # meanwhile, perhaps before `on_cancel` was set
            window.open()
        return window

    @property
    def is_full(self) -> bool:
        """True if `acquire` would wait."""
        return not self._is_open and self._sent - self._read >= UNREAD

    def acquire(self) -> None:
        """Wait until one more response may be sent. Any thread except the reader's."""
        with self._turn:
            if self._sent - self._read >= UNREAD:
                self._wait()
            self._sent += 1

    def release(self) -> None:
        """Count one response as read. Called on one thread; never blocks."""
        self._read += 1
        if self._gate.locked() and self._sent - self._read <= UNREAD // 2:
            self._wake()

    def open(self) -> None:
        """Stop limiting: all producers go on. Any thread."""
        self._is_open = True
        self._wake()

    def _wait(self) -> None:
        """Return when half of the sent responses are read. Misses no read that happens between two lines here."""
        self._gate.acquire(blocking=False)
        while not self._is_open and self._sent - self._read > UNREAD // 2:
            self._gate.acquire()
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # already free
            self._gate.release()


class StreamRunner(Runner):
    """Runs a `headrace.StreamInstance`: one request after the other, each until its iterator ends."""

    def __init__(self, schema: OutputSchema, instance: StreamInstance) -> None:
        super().__init__(schema)
        self._stream = instance.stream

    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Answer], BatchTimes]:
        started = monotonic_ns()
        # Requests at the end of the batch may be cancelled while earlier ones are answered.
        answers = [cancelled(ticket) if ticket.cancelled else self._exhaust(ticket) for ticket in batch]
        ended = monotonic_ns()
        return answers, BatchTimes(started, started, ended, ended)

    def _exhaust(self, ticket: Ticket) -> HeadraceError | None:
        window, request = CreditWindow.over(ticket), ticket.begin()
        ticket.started_ns = monotonic_ns()
        try:
            with contextlib.closing(self._stream(request)) as responses:  # type: ignore[type-var]
                for response in responses:
                    window.acquire()
                    if ticket.cancelled:
                        return cancelled(ticket)
                    self.sink.send(ticket, self.schema.sign(request, response), False)
        except BaseException as error:
            return as_error(error, self.schema)
        finally:
            ticket.end()
        return None


class DeferredRunner(Runner):
    """Runs a `headrace.DeferredInstance`.

    Last answers that ``accept`` returns, or that are sent on the instance's thread before it returns, are returned
    together. All other answers go to the sink at once.
    """

    def __init__(self, schema: OutputSchema, instance: DeferredInstance) -> None:
        super().__init__(schema)
        self._accept = instance.accept
        self._thread = 0
        self._batches = 0
        #: The answers to the batch that ``accept`` is called with now.
        self._answers: list[Returned] | None = None
        #: Weak references, so that a call which the model has dropped ends itself. The thread that removes a ticket
        #: (only one can) gives it its last answer.
        self.open: dict[Ticket, weakref.ref[DeferredCall]] = {}

    @property
    def unanswered(self) -> Sequence[Ticket]:
        return tuple(self.open)

    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Returned], BatchTimes]:
        started = monotonic_ns()
        self._thread = threading.get_ident()
        self._batches += 1
        answers: list[Returned] = [LATER] * len(batch)
        self._answers = answers
        self._begin(batch, started, answers)
        self._answers = None
        ended = monotonic_ns()
        return answers, BatchTimes(started, started, ended, ended)

    def close(self) -> None:
        for reference in tuple(self.open.values()):
            if (call := reference()) is not None:
                call.end(Unavailable(f"{call.request.log_id}model '{self.schema.name}' is being unloaded"))

    def end_abandoned(self, ticket: Ticket) -> None:
        """End the call of ``ticket``, whose caller has disconnected. Any thread.

        It ends even if the model still references it. Otherwise a model that never ends a call could not be unloaded.
        """
        if not ticket.abandoned:
            return  # only cancelled: the model may read ``cancelled``, and the caller waits for its answer
        reference = self.open.get(ticket)
        call = None if reference is None else reference()
        if call is not None:
            call.end(cancelled(ticket))

    def finish(self, ticket: Ticket, batch: int, place: int, answer: Answer) -> None:
        """Take the last answer to ``ticket``, at ``place`` of batch number ``batch``. Any thread."""
        ticket.end()
        answers = self._answers
        if answers is not None and batch == self._batches and threading.get_ident() == self._thread:
            answers[place] = answer
        else:
            self.sink.send(ticket, answer, True)

    def _begin(self, batch: Sequence[Ticket], started_ns: int, answers: list[Returned]) -> None:
        """Call ``accept``. Keep no reference to a call afterwards, so that calls which the instance has dropped end."""
        calls = [self._call(ticket, place, started_ns) for place, ticket in enumerate(batch)]
        try:
            returned = self._accept(calls)
            if returned is not None:
                self._answer(calls, returned, answers)
        except BaseException as error:
            failure = as_error(error, self.schema)
            for call in calls:
                call.end(failure)

    def _answer(self, calls: Sequence[DeferredCall], returned: Sequence[Answer], answers: list[Returned]) -> None:
        """Take what ``accept`` returned. Raises `BackendError`."""
        if len(returned) != len(calls):
            raise BackendError(
                f"model '{self.schema.name}': the backend gave {len(returned)} answers for {len(calls)} requests"
            )
        for place, (call, answer) in enumerate(zip(calls, returned, strict=True)):
            if answer is not None and call.remove():
                call.said_last, ticket = True, call.ticket
                ticket.end()
                answers[place] = cancelled(ticket) if ticket.abandoned else self.schema.signed(call.request, answer)

    def _call(self, ticket: Ticket, place: int, started_ns: int) -> DeferredCall:
        ticket.started_ns = started_ns
        call = DeferredCall(self, ticket, self._batches, place)
        self.open[ticket] = weakref.ref(call)
        ticket.on_cancel = self.end_abandoned
        if ticket.abandoned:  # meanwhile
            self.end_abandoned(ticket)
        return call


class DeferredCall(Call):
    """One request between `DeferredRunner.run` and its last answer."""

    def __init__(self, runner: DeferredRunner, ticket: Ticket, batch: int, place: int) -> None:
        self.request = ticket.begin()
        self.ticket = ticket
        self._runner = runner
        self._batch = batch
        self._place = place
        self._window: OrderedWindow | None = None
        #: True if the model has sent the last answer.
        self.said_last = False

    @property
    def would_block(self) -> bool:  # type: ignore[override]  # mypy: a property in place of an attribute
        return self._window is not None and self._window.is_full

    def send(self, answer: InferResponse | HeadraceError | None, final: bool = True) -> None:
        ticket, runner = self.ticket, self._runner
        if self.said_last:
            raise BackendError(f"model '{runner.schema.name}': an answer after the last one")
        self.said_last = final
        if not final:
            self._progress(answer)
        elif ticket.abandoned:
            self.end(cancelled(ticket))
        else:
            self.end(runner.schema.signed(self.request, answer))

    def end(self, answer: Answer) -> None:
        """Make ``answer`` the last one. Do nothing if there is one already. Any thread."""
        if self.remove():
            runner = self._runner
            if isinstance(answer, HeadraceError) and self.used is not None and (used := self.used()) is not None:
                runner.sink.send(self.ticket, runner.schema.signed(self.request, used), False)
            runner.finish(self.ticket, self._batch, self._place, answer)

    def remove(self) -> bool:
        """Remove the call from the open ones. Return True to one thread only, which then gives the last answer."""
        if self._runner.open.pop(self.ticket, None) is None:
            return False
        if self._window is not None:
            self._window.end()
        return True

    def _progress(self, answer: InferResponse | HeadraceError | None) -> None:
        ticket, runner = self.ticket, self._runner
        if answer is None:
            raise BackendError(f"model '{runner.schema.name}': an answer that is not the last must not be None")
        window = self._watched()
        window.acquire()
        answer = runner.schema.signed(self.request, answer)
        with window.order:
            if ticket in runner.open and not ticket.abandoned:
                runner.sink.send(ticket, answer, False)

    def _watched(self) -> OrderedWindow:
        """Return the window of this call. Created late, because most calls are answered once."""
        if self._window is None:
            with _MAKING_A_WINDOW:
                if self._window is None:
                    window = OrderedWindow()
                    self.ticket.on_read = lambda _: window.release()
                    self._window = window
            if self.ticket not in self._runner.open:  # also after a disconnect: see `end_abandoned`
                self._window.open()
        return self._window

    def __del__(self) -> None:
        if self.ticket in self._runner.open:
            self.end(BackendError(f"model '{self._runner.schema.name}': the backend gave no last answer"))


class OrderedWindow(CreditWindow):
    """A credit window of a request that several threads may answer."""

    __slots__ = ("order",)

    def __init__(self) -> None:
        super().__init__()
        #: Held while an answer is sent that is not the last.
        self.order = threading.Lock()

    def end(self) -> None:
        """Stop limiting, and return when no answer is being sent. The last one follows."""
        self.open()
        with self.order:
            pass


#: Two threads that send the first responses of one request at once share its window. A finalizer may run in between.
_MAKING_A_WINDOW = threading.RLock()
