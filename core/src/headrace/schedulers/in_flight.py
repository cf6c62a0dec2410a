"""The requests of one model between submit and answer: the waiting ones, and all open ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from enum import Enum
from itertools import chain, islice
from typing import Final, TypeAlias

from headrace.errors import Unavailable
from headrace.messages.response import Answer
from headrace.messages.ticket import Ticket
from headrace.telemetry.log_limits import rate_limited_logger

log = rate_limited_logger(__name__)

Lane: TypeAlias = "OrderedDict[Ticket, None]"


class RequestQueue:
    """The waiting requests. Lower levels are first; within a level first in, first out; postponed requests are last.

    `add` and `postpone` run on the event loop, everything else on any thread.

    The thread that removes a request from the queue owns it. Removal is one C call on an ``OrderedDict``, which is
    atomic under the interpreter's lock. So the event loop (adds, cancels, expires) and the threads of instances (take)
    need no lock of their own.
    """

    def __init__(self) -> None:
        #: The requests that wait at level 1 and are not postponed: nearly all.
        self.first: Lane = OrderedDict()
        #: Per level in use: the waiting requests, and the postponed ones. A model may have 2^64 - 1 levels.
        self._levels: dict[int, tuple[Lane, Lane]] = {1: (self.first, OrderedDict())}
        #: All lanes in order of service. Replaced, never changed.
        self.lanes: tuple[Lane, ...] = self._levels[1]

    def __len__(self) -> int:
        return sum(map(len, self.lanes))

    def __contains__(self, ticket: Ticket) -> bool:
        return any(ticket in lane for lane in self.lanes)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self.head(len(self)))

    def size(self, level: int) -> int:
        """Return how many requests wait at ``level``, counted from 1."""
        return sum(map(len, self._levels.get(level, ())))

    def add(self, ticket: Ticket, level: int = 1) -> None:
        lanes = self._levels.get(level) or self._open(level)
        lanes[0][ticket] = None

    def postpone(self, ticket: Ticket, level: int) -> bool:
        """Move ``ticket`` behind the unexpired requests of ``level``. Return False if it no longer waits."""
        if not self.remove(ticket):
            return False
        lanes = self._levels.get(level) or self._open(level)  # ``_open`` if the level was removed meanwhile
        lanes[1][ticket] = None
        return True

    def remove(self, ticket: Ticket) -> bool:
        """Remove ``ticket``. Return True if it waited: the calling thread now owns it."""
        for lane in self.lanes:  # noqa: SIM110 (a generator would double the cost of a request)
            if lane.pop(ticket, self) is None:
                return True
        return False

    def _open(self, level: int) -> tuple[Lane, Lane]:
        """Create the lanes of ``level``, and remove the levels above 1 where nothing waits: callers choose the levels.

        Only `add` and `postpone` put requests into a lane, and they run on this thread. So an empty lane stays empty.
        """
        levels = {known: lanes for known, lanes in self._levels.items() if known == 1 or lanes[0] or lanes[1]}
        levels[level] = (OrderedDict(), OrderedDict())
        self._levels = dict(sorted(levels.items()))
        self.lanes = tuple(chain.from_iterable(self._levels.values()))
        return levels[level]

    def head(self, count: int) -> tuple[Ticket, ...]:
        """Return the next ``count`` requests. They still wait, and any thread may take them."""
        lanes = self.lanes
        is_one = len(lanes) == 2 and not lanes[1]  # few models have levels or postponed requests
        while True:
            try:
                # tuple() over C iterators runs no bytecode, so another thread hardly ever runs in between.
                return tuple(islice(lanes[0] if is_one else chain.from_iterable(lanes), count))
            except RuntimeError:  # another thread changed a lane all the same
                continue


class _Awaited(Enum):
    """The placeholder of an answer that has not arrived."""

    AWAITED = "awaited"


#: A constant, because reading the enum's member takes longer than the rest of the call.
AWAITED: Final = _Awaited.AWAITED


class InFlightTracker:
    """Keeps the requests in flight and delivers their answers. `close` waits for the last one. Event loop only.

    ``ordered`` holds an answer back until all earlier requests are answered (``preserve_ordering``,
    docs/spec/behaviours.md section 6.2). ``caller_reads`` is True for a decoupled model: its caller calls `Ticket.read`
    for each response. Else `progress` calls it. Answers to a request that is already answered are dropped.
    """

    def __init__(self, ordered: bool = False, caller_reads: bool = False) -> None:
        self.is_closing = False
        #: Delivers a final answer, now or in turn.
        self.answer: Callable[[Ticket, Answer], None] = self._answer_in_turn if ordered else self._finish
        self._caller_reads, self._is_delivering = caller_reads, False
        self._emptied = asyncio.Event()
        #: The requests that have entered, with `AWAITED` or the answer that is held back. In order of entry if
        #: ``ordered``.
        self.open: dict[Ticket, Answer | _Awaited] = OrderedDict() if ordered else {}

    @property
    def count(self) -> int:
        """Requests that have entered and are not answered."""
        return len(self.open)

    def forget(self, ticket: Ticket) -> None:
        """Remove ``ticket``, which was refused."""
        del self.open[ticket]

    def awaits(self, ticket: Ticket) -> bool:
        """Return True if ``ticket`` has entered and has no final answer, not even one that is held back."""
        return self.open.get(ticket) is AWAITED

    def progress(self, ticket: Ticket, response: Answer) -> None:
        """Deliver a response to ``ticket`` that is not its last. Decoupled models keep no order."""
        if ticket in self.open:
            write(ticket, response, False)
        if not self._caller_reads:
            ticket.read()

    async def close(self) -> None:
        """Wait until every request is answered. The caller refuses new ones."""
        self.is_closing = True
        if self.open:
            await self._emptied.wait()

    def abandon(self, reason: str) -> None:
        """Answer and cancel every request now. Each gets the answer that was held back, else `Unavailable` with
        ``reason``."""
        self.is_closing = True
        for ticket, stored in tuple(self.open.items()):
            ticket.respond_at_once = None
            answer = Unavailable(f"{ticket.request.log_id}{reason}") if stored is AWAITED else stored
            self._finish(ticket, answer)
            ticket.cancel()
        self._emptied.set()

    def _answer_in_turn(self, ticket: Ticket, answer: Answer) -> None:
        """Hold ``answer`` back until all earlier requests have theirs. Then deliver each answer whose turn it is."""
        if ticket in self.open:
            self.open[ticket] = answer
        if self._is_delivering:  # a watcher of the request that is being answered called this
            return
        self._is_delivering = True
        try:
            while self.open:
                head, stored = next(iter(self.open.items()))
                if stored is AWAITED:
                    return
                self._finish(head, stored)
        finally:
            self._is_delivering = False

    def _finish(self, ticket: Ticket, answer: Answer) -> None:
        if self.open.pop(ticket, self) is self:
            return  # already answered
        try:  # inlined from `write`
            if ticket.watchers is not None:
                answer = call_watchers(ticket, answer, True)
            ticket.respond(answer, True)
        except KeyboardInterrupt:
            raise
        except BaseException:
            _log_unwritten(ticket)
        if self.is_closing and not self.open:
            self._emptied.set()


def write(ticket: Ticket, answer: Answer, final: bool) -> None:
    """Give ``answer`` to the watchers of ``ticket`` and then to its caller. Log exceptions."""
    try:
        if ticket.watchers is not None:
            answer = call_watchers(ticket, answer, final)
        ticket.respond(answer, final)
    except KeyboardInterrupt:  # on the event loop, the operator interrupts it
        raise
    except BaseException:
        _log_unwritten(ticket)


def call_watchers(ticket: Ticket, answer: Answer, final: bool, skip: int = 0) -> Answer:
    """Return ``answer`` after the watchers of ``ticket`` have changed it, the newest watcher first.

    The first ``skip`` watchers are skipped. The called ones are removed with the final answer.
    """
    watchers = (ticket.watchers or [])[skip:]
    if final and ticket.watchers:
        del ticket.watchers[skip:]
    for watcher in reversed(watchers):
        try:
            answer = watcher(ticket, answer, final)
        except KeyboardInterrupt:
            raise
        except BaseException:
            log.exception("a watcher failed at an answer of model '%s'", ticket.request.model_name)
    return answer


def _log_unwritten(ticket: Ticket) -> None:
    log.exception("a frontend failed to write the answer to request '%s'", ticket.request.id)
