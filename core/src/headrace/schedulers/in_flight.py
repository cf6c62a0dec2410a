"""The requests of one model between submit and answer: those that wait for an instance, and all that are open."""

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
from headrace.telemetry.pacing import paced

log = paced(__name__)

Lane: TypeAlias = "OrderedDict[Ticket, None]"


class RequestQueue:
    """Those that wait: first in, first out within a level; lower levels first; postponed requests after the others of
    their level. `add`, `postpone` on the event loop; everything else on any thread.

    Whoever removes a request from the queue owns it. Removal is one C call on an ``OrderedDict``, atomic under the
    interpreter's lock, so that the event loop (which adds, cancels and expires) and the instance threads (which take)
    need no lock of their own.
    """

    def __init__(self) -> None:
        #: Of each level that was asked for: those that wait, and those that were postponed. A model may have 2^64 - 1.
        self._levels: dict[int, tuple[Lane, Lane]] = {}
        #: All of them, in the order in which they are served. Replaced, never changed.
        self.lanes: tuple[Lane, ...] = ()

    def __len__(self) -> int:
        return sum(map(len, self.lanes))

    def __contains__(self, ticket: Ticket) -> bool:
        return any(ticket in lane for lane in self.lanes)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self.head(len(self)))

    def size(self, level: int) -> int:
        """Requests waiting at ``level``, counted from 1."""
        return sum(map(len, self._levels.get(level, ())))

    def add(self, ticket: Ticket, level: int = 1) -> None:
        lanes = self._levels.get(level) or self._open(level)
        lanes[0][ticket] = None

    def postpone(self, ticket: Ticket, level: int) -> bool:
        """Move behind the unexpired requests of ``level``; False if it is no longer waiting."""
        if not self.remove(ticket):
            return False
        lanes = self._levels.get(level) or self._open(level)  # none, if the level was forgotten
        lanes[1][ticket] = None
        return True

    def remove(self, ticket: Ticket) -> bool:
        """Take ``ticket`` out; True makes the caller its owner."""
        for lane in self.lanes:  # noqa: SIM110 (a generator would double the cost of a request)
            if lane.pop(ticket, self) is None:
                return True
        return False

    def _open(self, level: int) -> tuple[Lane, Lane]:
        """Make the lanes of ``level``, and forget the levels where nothing waits: callers choose levels.

        Only `add` and `postpone`, on the same thread, put anything into a lane, so that an empty one stays so.
        """
        kept = {known: lanes for known, lanes in self._levels.items() if lanes[0] or lanes[1]}
        kept[level] = (OrderedDict(), OrderedDict())
        self._levels = dict(sorted(kept.items()))
        self.lanes = tuple(chain.from_iterable(self._levels.values()))
        return kept[level]

    def head(self, count: int) -> tuple[Ticket, ...]:
        """The next ``count`` requests, still waiting and still nobody's."""
        lanes = self.lanes
        is_one = len(lanes) == 2 and not lanes[1]  # hardly a model has levels, or postponed requests
        while True:
            try:
                # tuple() over C iterators: no bytecode runs in between, so hardly ever another thread.
                return tuple(islice(lanes[0] if is_one else chain.from_iterable(lanes), count))
            except RuntimeError:  # a lane changed meanwhile, after all
                continue


class _Awaited(Enum):
    """Stands for an answer that has not come."""

    AWAITED = "awaited"


#: Looked up once: that of a member takes longer than all the rest of entering.
AWAITED: Final = _Awaited.AWAITED


class InFlightTracker:
    """Knows what is in flight, answers it, and says when nothing is left. Event loop only.

    ``ordered`` holds answers back until all earlier requests are answered
    (``preserve_ordering``, docs/spec/behaviours.md section 6.2). ``counted`` callers take any number of
    responses and say which they have read; those of a model that is not decoupled take one.
    What is said to a request that has been answered already, as `abandon` does, is dropped.
    """

    def __init__(self, ordered: bool = False, counted: bool = False) -> None:
        self.is_closing = False
        #: Gives a request its final answer, now or when its turn comes.
        self.answer: Callable[[Ticket, Answer], None] = self._answer_in_turn if ordered else self._finish
        self._counted, self._is_giving = counted, False
        self._emptied = asyncio.Event()
        #: Those that have entered (whoever owns them sets them to `AWAITED`), in order of entry if that counts, with
        #: the answers that are held back.
        self.open: dict[Ticket, Answer | _Awaited] = OrderedDict() if ordered else {}

    @property
    def count(self) -> int:
        """Requests that have entered and not been answered."""
        return len(self.open)

    def forget(self, ticket: Ticket) -> None:
        """``ticket`` has not entered after all."""
        del self.open[ticket]

    def __contains__(self, ticket: Ticket) -> bool:
        """Whether ``ticket`` has entered and has no last answer."""
        return self.open.get(ticket) is AWAITED

    def progress(self, ticket: Ticket, response: Answer) -> None:
        """Give ``ticket`` a response that is not its last; decoupled models keep no order."""
        if ticket in self.open:
            write(ticket, response, False)
        if not self._counted:
            ticket.read()

    async def close(self) -> None:
        """Wait until every request that entered is answered; the caller refuses new ones."""
        self.is_closing = True
        if self.open:
            await self._emptied.wait()

    def abandon(self, reason: str) -> None:
        """Answer every request, now: with `Unavailable` for ``reason``, unless its answer was held back.
        Have what is executed for it end."""
        self.is_closing = True
        for ticket, held in tuple(self.open.items()):
            ticket.respond_at_once = None
            answer = Unavailable(f"{ticket.request.log_id}{reason}") if held is AWAITED else held
            self._finish(ticket, answer)
            ticket.cancel()
        self._emptied.set()

    def _answer_in_turn(self, ticket: Ticket, answer: Answer) -> None:
        """Hold ``answer`` back until all earlier requests have theirs; then give out what is next in turn."""
        if ticket in self.open:
            self.open[ticket] = answer
        if self._is_giving:  # called by a watcher of the request whose turn it is
            return
        self._is_giving = True
        try:
            while self.open:
                head, held = next(iter(self.open.items()))
                if held is AWAITED:
                    return
                self._finish(head, held)
        finally:
            self._is_giving = False

    def _finish(self, ticket: Ticket, answer: Answer) -> None:
        if self.open.pop(ticket, self) is self:
            return  # answered before
        try:  # as `write` does, without a call
            if ticket.watchers is not None:
                answer = show(ticket, answer, True)
            ticket.respond(answer, True)
        except KeyboardInterrupt:
            raise
        except BaseException:
            _log_unwritten(ticket)
        if self.is_closing and not self.open:
            self._emptied.set()


def write(ticket: Ticket, answer: Answer, final: bool) -> None:
    """Give ``answer`` to the watchers of ``ticket`` and to its caller. Log what one of them raises."""
    try:
        if ticket.watchers is not None:
            answer = show(ticket, answer, final)
        ticket.respond(answer, final)
    except KeyboardInterrupt:  # on the event loop, the operator pressed it
        raise
    except BaseException:
        _log_unwritten(ticket)


def show(ticket: Ticket, answer: Answer, final: bool, since: int = 0) -> Answer:
    """Return ``answer`` as the watchers of ``ticket`` leave it, the last one added first, without the first ``since``.

    These watchers are removed with the final answer.
    """
    watchers = (ticket.watchers or [])[since:]
    if final and ticket.watchers:
        del ticket.watchers[since:]
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
