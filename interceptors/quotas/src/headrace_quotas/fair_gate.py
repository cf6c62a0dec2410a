"""The gate of a model: admits as many requests as fill its instances, and shares the model among principals.

While the gate is full, requests wait in the queue of their `Use`. Start-time fair queueing (Goyal, Vin, Cheng:
Start-time Fair Queueing, SIGCOMM 1996) chooses the next one. Each request costs rows / weight of virtual time, and the
use with the smallest start time is next. So a use of weight w that always has waiting requests gets at least w / (the
sum of the weights of all such uses) of the model. An idle use gets no credit for the past. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from sys import maxsize

from headrace import (
    Caller,
    HeadraceError,
    Meter,
    ModelView,
    Outcome,
    ResourceExhausted,
    Unavailable,
    Watch,
)
from headrace_quotas.accounts import RETRY_S, Account, QuotaRefusal, Tenant
from headrace_quotas.gate_limit import GateLimit
from headrace_quotas.quota_file import Sharing


class Use(Watch, Meter):
    """The use of one model by one tenant. It is the watch of admitted requests, and the meter of requests like them.

    ``total`` is the account of the tenant, ``own`` that of this model. ``finish`` is the virtual time at which its last
    request ends, and ``step`` the cost of one row: 1 / weight.
    """

    __slots__ = ("counters", "finish", "gate", "in_flight", "is_queued", "model", "own", "step", "tenant", "total",
                 "waiting")  # fmt: skip

    def __init__(self, tenant: Tenant, model: str, gate: FairGate, now_s: float) -> None:
        self.tenant, self.model, self.gate = tenant, model, gate
        self.total, self.counters = tenant.account, tenant.counters
        self.in_flight, self.finish, self.is_queued = 0, 0.0, False
        #: Its requests that wait in the gate, oldest first. None before the first one.
        self.waiting: OrderedDict[QueuedRequest, None] | None = None
        self.own: Account | None = None
        self.update(now_s)

    @property
    def who(self) -> str:
        return f"{self.tenant.who} with model '{self.model}'"

    def update(self, now_s: float) -> None:
        """Use the current quota of the tenant."""
        self.step = 1 / self.tenant.quota.weight
        found = self.tenant.quota.of_model(self.model) if self.model else None
        if found is None:
            self.own = None
        elif self.own is None:
            self.own = Account(found[1], now_s)
        else:
            self.own.set(found[1], now_s)

    @property
    def has_token_limit(self) -> bool:
        own = self.own
        return self.total.tokens is not None or (own is not None and own.tokens is not None)

    def begin(self, model: ModelView, size_bytes: int) -> bool:
        """Admit a request as `Quotas.admit` does. Return False if it must wait or be refused."""
        gate, total = self.gate, self.total
        now_s, in_flight, full_s = gate.clock(), total.in_flight, total.full_s
        if (
            (gate.metered_view is not model and gate.is_observed)
            or in_flight >= total.max_in_flight
            or full_s > now_s + total.slack_s
            or (total.has_debts and total.is_in_debt(now_s))
        ):
            return False
        own = self.own
        if own is not None and own.is_used_up(self.in_flight, now_s):
            return False
        if (
            gate.is_shared
            and (gate.owner is not self or gate.in_flight >= gate.limit.now)
            and (gate.waiting or not gate.try_admit(self, now_s))
        ):
            return False
        total.full_s = (full_s if full_s > now_s else now_s) + total.step_s
        if total.has_debts and total.input_bytes is not None:
            total.input_bytes.take(size_bytes, now_s)
        if own is not None:
            own.take(size_bytes, now_s)
        total.in_flight = in_flight + 1
        self.in_flight += 1
        gate.in_flight += 1
        counters = self.counters
        counters.admitted += 1
        counters.input_bytes += size_bytes
        return True

    def end(self) -> None:
        self.in_flight -= 1
        self.total.in_flight -= 1
        gate = self.gate
        gate.in_flight -= 1
        if gate.waiting:
            gate.admit_waiting()

    def take_back(self, size_bytes: int) -> None:
        """Undo `begin`, except its cost in the gate."""
        now_s = self.gate.clock()
        for account in (self.total, self.own):
            if account is not None:
                account.full_s -= account.step_s
                if account.input_bytes is not None:
                    account.input_bytes.take(-size_bytes, now_s)
        self.counters.admitted -= 1
        self.counters.input_bytes -= size_bytes
        self.end()

    def ended(self, outcome: Outcome) -> None:
        self.in_flight -= 1
        self.total.in_flight -= 1
        gate = self.gate
        gate.in_flight -= 1
        if gate.waiting:
            gate.admit_waiting()

    def charge_tokens(self, tokens: int) -> None:
        """Count the output tokens of a response."""
        now_s = self.gate.clock()
        self.counters.tokens += tokens
        if self.total.tokens is not None:
            self.total.tokens.take(tokens, now_s)
        if self.own is not None and self.own.tokens is not None:
            self.own.tokens.take(tokens, now_s)

    def is_idle(self, now_s: float) -> bool:
        """True if it can be removed: a new one would refuse the same requests."""
        if self.in_flight or not (self.own is None or self.own.is_unused(now_s)):
            return False
        return self.tenant.uses > 1 or self.total.is_unused(now_s)


class FairGate:
    """The admission of requests to one model. Without ``sharing``, it has no limit.

    ``uses`` is the number of its `Use` objects.
    """

    __slots__ = (
        "_heap", "_latest", "_number", "_virtual", "clock", "has_rows", "in_flight", "is_observed", "is_shared",
        "limit", "metered_view", "model", "owner", "reports_tokens", "sharing", "uses", "view", "waiting",
        "waiting_bytes",
    )  # fmt: skip

    def __init__(
        self, model: str, sharing: Sharing | None, clock: Callable[[], float], is_observed: bool = True
    ) -> None:
        """Create the gate. If ``is_observed``, its owner calls `observe` and `recompute`."""
        self.model, self.clock, self.uses, self.in_flight = model, clock, 0, 0
        self.waiting = self.waiting_bytes = 0
        self.limit = GateLimit(clock)
        #: The version of the last request. None before the first one.
        self.view: ModelView | None = None
        #: The version whose requests `Use.begin` may count: ``view``, or None if its responses have tokens to count.
        self.metered_view: ModelView | None = None
        self.is_observed = is_observed
        #: True if the tokens in responses are counted.
        self.reports_tokens = False
        #: True if each row of a request counts.
        self.has_rows = False
        self._heap: list[tuple[float, int, Use]] = []
        #: The virtual time, and the latest finish.
        self._virtual = self._latest = 0.0
        self._number = count()
        #: The use of the last request.
        self.owner: Use | None = None
        self.update(sharing)

    def update(self, sharing: Sharing | None) -> None:
        """Set other settings."""
        self.sharing, self.is_shared = sharing or Sharing(), sharing is not None
        self.limit.update(self.sharing.in_flight if self.is_shared else maxsize)
        if self.view is not None:
            self.observe(self.view, self.reports_tokens)
        self.admit_waiting()

    def observe(self, view: ModelView, reports_tokens: bool) -> None:
        """Record that version ``view`` gets requests."""
        self.view, self.reports_tokens = view, reports_tokens
        self.metered_view = None if reports_tokens else view
        self.has_rows = self.is_shared and view.max_batch_size > 0
        self.limit.observe(view)
        self.admit_waiting()

    def recompute(self) -> bool:
        """Recompute the limit. Return False if that must be repeated soon."""
        is_settled = self.limit.recompute()
        if is_settled:
            self.view = self.metered_view = None  # until the next request
        if not (self.limit.is_shared or self.waiting):
            self.owner, self._virtual = None, self._latest  # all debts end
        self.admit_waiting()
        return is_settled

    # ------------------------------------------------------------------ requests

    def try_admit(self, use: Use, now_s: float) -> bool:
        """Charge a request of ``use``, and return True if it may be admitted now. Else it must wait.

        The caller counts it as in flight. It need not call this while only ``use`` uses the model and the gate has
        room.
        """
        if self.owner is not use:
            if self.owner is not None:
                self.limit.share(now_s)
            self.owner = use
        if self.in_flight >= self.limit.now:
            return False
        self._charge(use, max(use.finish, self._virtual))
        return True

    def charge_rows(self, use: Use, more: int) -> None:
        """Charge ``more`` rows of a request of ``use``: all but the first, which is charged at admission."""
        use.finish += more * use.step
        self._latest = max(self._latest, use.finish)

    def _charge(self, use: Use, start: float) -> None:
        self._virtual, use.finish = start, start + use.step
        self._latest = max(self._latest, use.finish)

    def refusal(self, use: Use, size_bytes: int) -> QuotaRefusal | None:
        """Return the reason why a request of ``use`` may not wait, or None if it may.

        If the queue is full and another use has the largest load in it, the newest request of that use is refused
        instead.
        """
        while not self._has_room(size_bytes):
            share = self.waiting / max(1, len(self._heap)) / use.step
            if len(use.waiting or ()) > share:  # above average: it is not the smallest
                return self._full()
            largest = max((each for _, _, each in self._heap), key=self._load, default=use)
            if self._load(use, 1, size_bytes) >= self._load(largest):
                return self._full()
            if not largest.waiting:
                return self._full()
            next(reversed(largest.waiting)).refuse(self._full())
        return None

    def _has_room(self, size_bytes: int) -> bool:
        sharing = self.sharing
        return self.waiting < sharing.max_waiting and self.waiting_bytes + size_bytes <= sharing.max_waiting_bytes

    def _load(self, use: Use, more: int = 0, more_bytes: int = 0) -> float:
        """Return the share of ``use`` in the queue, with ``more`` requests, divided by its weight."""
        waiting = use.waiting or ()
        size_bytes = sum([waiter.size_bytes for waiter in waiting]) + more_bytes
        part = max((len(waiting) + more) / self.sharing.max_waiting, size_bytes / self.sharing.max_waiting_bytes)
        return part * use.step

    def _full(self) -> QuotaRefusal:
        text = f"{self.waiting} requests wait for model '{self.model}', which is the limit"
        return QuotaRefusal("queue_full", text, RETRY_S)

    def queue(self, waiter: QueuedRequest) -> None:
        """Add ``waiter`` to the queue."""
        use = waiter.use
        if use.waiting is None:
            use.waiting = OrderedDict()
        use.waiting[waiter] = None
        self.waiting += 1
        self.waiting_bytes += waiter.size_bytes
        if not use.is_queued:
            use.is_queued = True
            heappush(self._heap, (max(use.finish, self._virtual), next(self._number), use))

    def remove(self, waiter: QueuedRequest) -> bool:
        """Remove a waiter. Return False if it was not in the queue."""
        waiting = waiter.use.waiting
        if waiting is None or waiting.pop(waiter, self) is self:
            return False
        self.waiting -= 1
        self.waiting_bytes -= waiter.size_bytes
        return True

    def admit_waiting(self) -> None:
        """Admit waiting requests, in order of start time, while the gate has room."""
        heap = self._heap
        while heap and self.in_flight < self.limit.now:
            start, _, use = heappop(heap)
            use.is_queued = False
            if not use.waiting:
                continue
            if start >= use.finish:
                self._charge(use, max(start, self._virtual))
                waiter = next(iter(use.waiting))
                self.remove(waiter)
                self.in_flight += 1
                waiter.admit()
            if use.waiting:
                use.is_queued = True
                heappush(heap, (use.finish, next(self._number), use))


class QueuedRequest(Watch):
    """A request that waits in a gate, or was admitted after a wait.

    It is the watch of the request instead of its use.
    """

    __slots__ = ("_has_ended", "_since_s", "_timer", "_watch", "future", "is_admitted", "size_bytes", "use")

    def __init__(self, use: Use, caller: Caller, watch: Watch) -> None:
        """Start to wait, until `ended` is called or the future is cancelled. Forwards `ended` to ``watch``."""
        loop = asyncio.get_running_loop()
        gate = use.gate
        self.use, self._watch, self.size_bytes = use, watch, caller.body_bytes
        self.is_admitted = self._has_ended = False
        self.future: asyncio.Future[None] = loop.create_future()
        self.future.add_done_callback(self._on_done)
        self._since_s = gate.clock()
        # gRPC hosts end calls at their deadline themselves.
        left_s = (caller.deadline_ns / 1e9 - self._since_s) if caller.deadline_ns and caller.transport != "grpc" else 0
        wait_s = gate.sharing.max_wait_seconds
        if left_s and left_s < wait_s:
            self._timer = loop.call_later(max(0.0, left_s), self._expire)
        else:
            self._timer = loop.call_later(wait_s, self.refuse, QuotaRefusal("waited", self._text(wait_s), RETRY_S))
        gate.queue(self)

    def _text(self, wait_s: float) -> str:
        return f"the request has waited {wait_s:g} s for a share of model '{self.use.model}', which is the limit"

    def admit(self) -> None:
        """Admit the request. The gate has counted it."""
        self.is_admitted = True
        self._stop_waiting()
        if not self.future.done():
            self.future.set_result(None)

    def refuse(self, refusal: QuotaRefusal) -> None:
        """Refuse the waiting request."""
        self.use.tenant.counters.refused[refusal.reason] += 1
        self._fail(ResourceExhausted(refusal.text, retry_after_s=refusal.retry_s))

    def _expire(self) -> None:
        self._fail(Unavailable("Request timeout expired"))  # as in a model queue

    def _fail(self, error: HeadraceError) -> None:
        if self.use.gate.remove(self):
            self._stop_waiting()
            if not self.future.done():
                self.future.set_exception(error)
                self.future.exception()  # marked as retrieved: nothing may await it any more

    def _stop_waiting(self) -> None:
        self._timer.cancel()
        self.use.tenant.counters.waited_s += self.use.gate.clock() - self._since_s

    def ended(self, outcome: Outcome) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if not self.is_admitted:
            if self.use.gate.remove(self):
                self._stop_waiting()
            self.use.gate.in_flight += 1  # `Use.ended` subtracts it
        self.future.cancel()
        self._watch.ended(outcome)

    def _on_done(self, future: asyncio.Future[None]) -> None:
        """End a request whose caller was cancelled while it waited."""
        if future.cancelled() and not self._has_ended:
            self.ended(Outcome(None, 0, 0))
