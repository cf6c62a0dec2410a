"""Finds calls between models that can never be answered, because they wait for each other.

An instance that executes a request, and calls another model for it, is blocked until that model answers. Calls and
blocked instances form a graph. A call is part of a deadlock if all of this holds:

- It waits in a queue.
- No instance that could take it is free, nor any instance that those wait for, directly or through others.
- Those instances wait for this call.

Only an error ends a deadlock. So finding one late does no harm, but finding one that does not exist would. Two things
look like a deadlock for a moment: outdated data, and an execution that is about to return and be answered later. A call
is therefore refused when `SCANS` scans in a row, `SCAN_S` apart, find it in a deadlock. Scans are counted, not timed: a
machine that was suspended has scanned nothing.

A scan examines what has changed since the last one. Its cost grows with the calls in progress. Every `SCANS_PER_SWEEP`
scans, it examines all calls: an execution that returns, a removed instance or a released resource can complete a
deadlock without a new call. A scan also stops calls for which no caller waits any more. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

from headrace.executors.executor import Executor
from headrace.messages.request import InferRequest
from headrace.messages.ticket import Padding, Ticket

#: The time between two scans, in s, and the number of scans in a row that must agree before a call is refused.
SCAN_S, SCANS = 0.05, 10
#: Every 20th scan, once a second, examines all calls.
SCANS_PER_SWEEP = 20

_Key = TypeVar("_Key")


class CalledModel(Protocol):
    """The part of `headrace.models.served.ServedModel` that is needed here."""

    name: str

    @property
    def executors(self) -> Sequence[Executor]: ...

    def has_waiting(self, ticket: Ticket) -> bool: ...


def no_executors(executor: Executor) -> Sequence[Executor]:
    """Return no executors: without a rate limiter, no executor waits for another."""
    return ()


class DeadlockDetector:
    """Keeps the calls that executors wait for, and those of schedulers, and breaks deadlocks among them.

    ``refuse`` is called with one call of each deadlock, and its path. ``blockers_of`` returns the executors that
    hold the resources which an executor waits for.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        refuse: Callable[[Ticket, Sequence[str]], None],
        blockers_of: Callable[[Executor], Sequence[Executor]] = no_executors,
    ) -> None:
        self._loop = loop
        self._refuse = refuse
        self._blockers_of = blockers_of
        #: By executor. The calls of schedulers, which block no executor, are under None.
        self._calls: dict[Executor | None, dict[Ticket, CalledModel]] = {}
        #: The same calls, by the request for which they were sent.
        self._sent_for: dict[InferRequest | None, dict[Ticket, CalledModel]] = {}
        #: Per call of an executor: the requests whose callers wait for it.
        self._awaiting: dict[Ticket, Sequence[Ticket]] = {}
        #: Calls that may be part of a deadlock: the called model, and the number of scans that have found the call in
        #: one.
        self._suspects: dict[Ticket, tuple[CalledModel, int]] = {}
        #: Executors and requests that had several calls and got an answer to one. The remaining calls may now be a
        #: deadlock.
        self._bereft_executors: set[Executor] = set()
        self._bereft_requests: set[InferRequest] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._scans = 0

    def add(
        self, executor: Executor | None, ticket: Ticket, target: CalledModel, awaiting: Sequence[Ticket] = ()
    ) -> None:
        """Add ``ticket``, which ``executor`` (None: a scheduler) has sent to ``target``.

        Stop it when all requests of ``awaiting`` are cancelled, unless that is empty.
        """
        if awaiting:
            self._awaiting[ticket] = awaiting
        self._calls.setdefault(executor, {})[ticket] = target
        self._sent_for.setdefault(ticket.request.caller, {})[ticket] = target
        self._suspects[ticket] = target, 0
        self._scan_soon()

    def discard(self, executor: Executor | None, ticket: Ticket) -> None:
        """Remove ``ticket``, which is answered."""
        self._suspects.pop(ticket, None)
        self._awaiting.pop(ticket, None)
        caller = ticket.request.caller
        _take(self._sent_for, caller, ticket)
        _take(self._calls, executor, ticket)
        if executor is not None and executor in self._calls:
            self._bereft_executors.add(executor)
            self._scan_soon()
        if caller is not None and caller in self._sent_for:
            self._bereft_requests.add(caller)
            self._scan_soon()

    def _scan_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(SCAN_S, self._scan)

    def _scan(self) -> None:
        self._timer = None
        self._scans += 1
        self._stop_abandoned()
        if self._scans % SCANS_PER_SWEEP == 0:
            self._suspect(self._calls.values())
        self._suspect_bereft_calls()
        awaited: dict[CalledModel, set[Ticket] | None] = {}
        # newest first: it has completed the deadlock
        for ticket, (target, times) in reversed(list(self._suspects.items())):
            if ticket not in self._suspects:
                continue  # refused with another
            if target not in awaited:
                awaited[target] = self._awaited_by(target.executors)
            if ticket not in (awaited[target] or ()) or not target.has_waiting(ticket):
                del self._suspects[ticket]
            elif times + 1 < SCANS:
                self._suspects[ticket] = target, times + 1
            else:
                self._break_deadlock(ticket, target)
                awaited.clear()
        if self._calls:
            self._scan_soon()

    def _stop_abandoned(self) -> None:
        """Stop the calls for requests that are all cancelled."""
        for call, awaiting in list(self._awaiting.items()):
            for ticket in awaiting:
                if not ticket.cancelled and not isinstance(ticket, Padding):
                    break
            else:
                call.stop()

    def _suspect_bereft_calls(self) -> None:
        calls = [
            self._calls.get(executor, {})
            for executor in self._bereft_executors
            if self._awaited_by((executor,)) is not None
        ]
        calls += [self._sent_for.get(request, {}) for request in self._bereft_requests]
        self._bereft_executors.clear()
        self._bereft_requests.clear()
        self._suspect(calls)

    def _suspect(self, some: Iterable[Mapping[Ticket, CalledModel]]) -> None:
        for calls in some:
            for ticket, target in calls.items():
                self._suspects.setdefault(ticket, (target, 0))

    def _break_deadlock(self, ticket: Ticket, target: CalledModel) -> None:
        """Refuse ``ticket``, and all calls to ``target`` for the same request, which cannot be answered either."""
        path = self._path(ticket, target)
        alike = [ticket] if ticket.request.caller is None else list(self._sent_for[ticket.request.caller])
        for call in alike:
            if target.has_waiting(call):
                self._refuse(call, path)

    def _awaited_by(self, executors: Iterable[Executor]) -> set[Ticket] | None:
        """Return the calls that ``executors`` wait for, directly or through others; None if one of them can go on."""
        calls: set[Ticket] = set()
        reached: set[Executor] = set()
        coming = list(executors)
        while coming:
            executor = coming.pop()
            if executor in reached:
                continue
            reached.add(executor)
            is_blocked = False
            for ticket, target in self._blocking_calls(executor):
                needed = self._able_executors(ticket, target, calls)
                if needed is None:
                    return None
                is_blocked = True
                coming += (able for able in needed if able not in reached)
            if not is_blocked:
                others = self._blockers_of(executor)
                if not others:
                    return None
                coming += others
        return calls

    def _blocking_calls(self, executor: Executor) -> Iterator[tuple[Ticket, CalledModel]]:
        """Return the calls that block ``executor``: those sent for the requests that it executes."""
        executing = executor.executing if executor.alive else ()
        calls: Mapping[Ticket, CalledModel] = self._calls.get(executor, {}) if executing else {}
        requests = [ticket.request for ticket in executing] if calls else ()
        return (
            (call, target)
            for call, target in calls.items()
            if call.request.caller is None or call.request.caller in requests
        )

    def _able_executors(self, ticket: Ticket, target: CalledModel, calls: set[Ticket]) -> Sequence[Executor] | None:
        """Return the executors of which one must go on to answer ``ticket``; None if that needs no executor.

        Adds to ``calls`` the call itself, and the calls that its answer waits for.
        """
        calls.add(ticket)
        if target.has_waiting(ticket):
            return target.executors
        executing = [executor for executor in target.executors if ticket in executor.executing]
        if executing:
            return executing
        # Its execution has returned. Another thread or call answers it.
        able: list[Executor] = []
        for call, further in self._sent_for.get(ticket.request, {}).items():
            needed = self._able_executors(call, further, calls)
            if needed is None:
                return None
            able += needed
        return able or None

    def _path(self, ticket: Ticket, target: CalledModel) -> list[str]:
        """Return the names along the deadlock. The last one is also an earlier one."""
        callers = ticket.request.callers
        if target.name in callers:
            return [*callers[callers.index(target.name) :], target.name]
        names = list(callers[-1:])
        while target.name not in names and target.executors:
            names.append(target.name)
            call = next(self._blocking_calls(target.executors[0]), None)
            if call is None:  # it waits for a call of one of the other instances
                return [*names, names[0]]
            _, target = call
        return [*names, target.name]


def _take(table: dict[_Key, dict[Ticket, CalledModel]], key: _Key, ticket: Ticket) -> None:
    """Remove ``ticket`` from ``table``, and its row if that is empty."""
    row = table[key]
    del row[ticket]
    if not row:
        del table[key]
