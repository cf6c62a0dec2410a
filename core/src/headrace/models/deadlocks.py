"""Calls between models that could never be answered, because those who could are waiting for them.

An instance that executes a request and, for it, waits for another model is held until that model
answers. Calls and held instances form a graph; a call is part of a deadlock if it waits in a queue,
no instance that could take it, nor any that these wait for in turn, is free to go on, and these
wait for the call itself. Nothing but an error ends a deadlock, so that to see it late is no mistake,
and to see one that is none would be. Two things can look like one for a moment: a picture that is
a moment old, and an execution that is about to return and have its answer given later. A call is
therefore refused when it was part of a deadlock in `LOOKS` looks on end, `LOOK_S` apart; they are
counted, not timed, so that a machine that stood still has seen nothing meanwhile.

A look examines what changed since the last one, at a cost that grows with the calls under way. Every `LOOKS_PER_SWEEP`
looks, it examines all calls: an execution that returns, an instance that is removed or a resource that is given back
can close a deadlock without a call. A look also stops calls for which no caller waits any more. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from headrace.executors.executor import Executor
from headrace.messages.request import InferRequest
from headrace.messages.ticket import Padding, Ticket

#: Between two looks, and so many of them find the same before a call is refused.
LOOK_S, LOOKS = 0.05, 10
#: How many looks apart all calls are examined: once a second.
LOOKS_PER_SWEEP = 20

_Key = TypeVar("_Key")


class AskedModel(Protocol):
    """What is needed of a `headrace.models.served.ServedModel`."""

    name: str

    @property
    def executors(self) -> Sequence[Executor]: ...

    def has_waiting(self, ticket: Ticket) -> bool: ...


def nobody(executor: Executor) -> Sequence[Executor]:
    """Who keeps ``executor`` from running what it has, where all instances run when they like."""
    return ()


class DeadlockDetector:
    """Calls that executors wait for, and schedulers for requests that no executor has. ``refuse`` is called with one of
    each deadlock, and its path. ``kept_waiting_by`` says who has the resources that an executor needs, if it waits for
    any."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        refuse: Callable[[Ticket, Sequence[str]], None],
        kept_waiting_by: Callable[[Executor], Sequence[Executor]] = nobody,
    ) -> None:
        self._loop = loop
        self._refuse = refuse
        self._kept_waiting_by = kept_waiting_by
        #: Those of schedulers, which hold no executor, are under None.
        self._calls: dict[Executor | None, dict[Ticket, AskedModel]] = {}
        #: The same by the request for which they were sent.
        self._sent_for: dict[InferRequest | None, dict[Ticket, AskedModel]] = {}
        #: Of each call of an executor, the requests whose callers wait for it.
        self._awaiting: dict[Ticket, Sequence[Ticket]] = {}
        #: What may have become part of a deadlock, with whom it was sent to and how many looks found it there.
        self._suspects: dict[Ticket, tuple[AskedModel, int]] = {}
        #: Who has lost one of several calls: those that are left may be all that they wait for now.
        self._bereft_executors: set[Executor] = set()
        self._bereft_requests: set[InferRequest] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._looks = 0

    def add(
        self, executor: Executor | None, ticket: Ticket, target: AskedModel, awaiting: Sequence[Ticket] = ()
    ) -> None:
        """``executor``, or a scheduler, has sent ``ticket`` to ``target``. Stop it when the callers of all requests of
        ``awaiting`` have left; without any, do not."""
        if awaiting:
            self._awaiting[ticket] = awaiting
        self._calls.setdefault(executor, {})[ticket] = target
        self._sent_for.setdefault(ticket.request.caller, {})[ticket] = target
        self._suspects[ticket] = target, 0
        self._look_soon()

    def discard(self, executor: Executor | None, ticket: Ticket) -> None:
        """``ticket`` is answered."""
        self._suspects.pop(ticket, None)
        self._awaiting.pop(ticket, None)
        caller = ticket.request.caller
        _take(self._sent_for, caller, ticket)
        _take(self._calls, executor, ticket)
        if executor is not None and executor in self._calls:
            self._bereft_executors.add(executor)
            self._look_soon()
        if caller is not None and caller in self._sent_for:
            self._bereft_requests.add(caller)
            self._look_soon()

    def _look_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        self._looks += 1
        self._stop_abandoned()
        if self._looks % LOOKS_PER_SWEEP == 0:
            self._suspect(self._calls.values())
        self._suspect_what_is_left()
        found: dict[AskedModel, set[Ticket] | None] = {}
        for ticket, (target, times) in reversed(list(self._suspects.items())):  # the last one has closed the deadlock
            if ticket not in self._suspects:
                continue  # refused with another
            if target not in found:
                found[target] = self._awaited_by(target.executors)
            if ticket not in (found[target] or ()) or not target.has_waiting(ticket):
                del self._suspects[ticket]
            elif times + 1 < LOOKS:
                self._suspects[ticket] = target, times + 1
            else:
                self._break_deadlock(ticket, target)
                found.clear()
        if self._calls:
            self._look_soon()

    def _stop_abandoned(self) -> None:
        """Stop the calls that were sent for requests whose callers have all left."""
        for call, awaiting in list(self._awaiting.items()):
            for ticket in awaiting:
                if not ticket.cancelled and not isinstance(ticket, Padding):
                    break
            else:
                call.stop()

    def _suspect_what_is_left(self) -> None:
        left = [
            self._calls.get(executor, {})
            for executor in self._bereft_executors
            if self._awaited_by((executor,)) is not None
        ]
        left += [self._sent_for.get(request, {}) for request in self._bereft_requests]
        self._bereft_executors.clear()
        self._bereft_requests.clear()
        self._suspect(left)

    def _suspect(self, some: Iterable[Mapping[Ticket, AskedModel]]) -> None:
        for calls in some:
            for ticket, target in calls.items():
                self._suspects.setdefault(ticket, (target, 0))

    def _break_deadlock(self, ticket: Ticket, target: AskedModel) -> None:
        """Refuse ``ticket``, and all that was sent to ``target`` for the same: no better off, and perhaps many."""
        path = self._path(ticket, target)
        alike = [ticket] if ticket.request.caller is None else list(self._sent_for[ticket.request.caller])
        for call in alike:
            if target.has_waiting(call):
                self._refuse(call, path)

    def _awaited_by(self, executors: Iterable[Executor]) -> set[Ticket] | None:
        """The calls that keep ``executors``, and whatever they wait for, from going on; None if one is free to."""
        calls: set[Ticket] = set()
        reached: set[Executor] = set()
        coming = list(executors)
        while coming:
            executor = coming.pop()
            if executor in reached:
                continue
            reached.add(executor)
            held = False
            for ticket, target in self._held_by(executor):
                needed = self._able(ticket, target, calls)
                if needed is None:
                    return None
                held = True
                coming += (able for able in needed if able not in reached)
            if not held:
                others = self._kept_waiting_by(executor)
                if not others:
                    return None
                coming += others
        return calls

    def _held_by(self, executor: Executor) -> Iterator[tuple[Ticket, AskedModel]]:
        """The calls that hold ``executor``: those sent for what it is executing."""
        executing = executor.executing if executor.alive else ()
        calls: Mapping[Ticket, AskedModel] = self._calls.get(executor, {}) if executing else {}
        requests = [ticket.request for ticket in executing] if calls else ()
        return (
            (call, target)
            for call, target in calls.items()
            if call.request.caller is None or call.request.caller in requests
        )

    def _able(self, ticket: Ticket, target: AskedModel, calls: set[Ticket]) -> Sequence[Executor] | None:
        """The executors of which one must go on to answer ``ticket``; None if that needs no executor.

        Adds to ``calls`` the request, and those that its answer waits for in turn.
        """
        calls.add(ticket)
        if target.has_waiting(ticket):
            return target.executors
        executing = [executor for executor in target.executors if ticket in executor.executing]
        if executing:
            return executing
        # Its execution has returned, and its answer comes from elsewhere: perhaps from calls in turn.
        found: list[Executor] = []
        for call, further in self._sent_for.get(ticket.request, {}).items():
            needed = self._able(call, further, calls)
            if needed is None:
                return None
            found += needed
        return found or None

    def _path(self, ticket: Ticket, target: AskedModel) -> list[str]:
        """The names along the deadlock; the last has been there before."""
        callers = ticket.request.callers
        if target.name in callers:
            return [*callers[callers.index(target.name) :], target.name]
        names = list(callers[-1:])
        while target.name not in names and target.executors:
            names.append(target.name)
            held = next(self._held_by(target.executors[0]), None)
            if held is None:  # it waits for what one of the others holds
                return [*names, names[0]]
            _, target = held
        return [*names, target.name]


def _take(table: dict[_Key, dict[Ticket, AskedModel]], key: _Key, ticket: Ticket) -> None:
    """Take ``ticket`` out of ``table``, and what is empty then."""
    row = table[key]
    del row[ticket]
    if not row:
        del table[key]
