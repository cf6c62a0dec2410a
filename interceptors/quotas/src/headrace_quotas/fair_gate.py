"""The gate of a model: lets in as many requests as fill its instances, and shares them among principals.

While the gate is full, requests wait in a queue of their `Use`. The next one is chosen by start-time fair queueing
(Goyal, Vin, Cheng: Start-time Fair Queueing, SIGCOMM 1996): each request costs its rows / weight of virtual time, and
the use with the smallest start time is next. So a use with the weight w that always has requests waiting gets at least
w / (sum of the weights of all that have) of the model, whatever the others send. A use that was quiet has the start
time of the present, and gets no credit for the past. Event loop only.
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
    """A tenant with one model. It watches each of its requests that is admitted, and is the meter of the others.

    ``total`` is the account of the tenant, ``own`` that of this model. ``finish`` is the virtual time of its last
    request in the gate, and ``step`` what one more costs: 1 / weight.
    """

    __slots__ = ("figures", "finish", "gate", "in_flight", "is_queued", "model", "own", "step", "tenant", "total",
                 "waiting")  # fmt: skip

    def __init__(self, tenant: Tenant, model: str, gate: FairGate, now_s: float) -> None:
        self.tenant, self.model, self.gate = tenant, model, gate
        self.total, self.figures = tenant.account, tenant.figures
        self.in_flight, self.finish, self.is_queued = 0, 0.0, False
        #: Its requests that wait in the gate, oldest first. None before the first one.
        self.waiting: OrderedDict[QueuedRequest, None] | None = None
        self.own: Account | None = None
        self.follow(now_s)

    @property
    def who(self) -> str:
        return f"{self.tenant.who} with model '{self.model}'"

    def follow(self, now_s: float) -> None:
        """Use the present quota of the tenant."""
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
        """`Quotas.admit` for a request that is refused nothing and need not wait."""
        gate, total = self.gate, self.total
        now_s, in_flight, full_s = gate.clock(), total.in_flight, total.full_s
        if (
            (gate.quick is not model and gate.is_followed)
            or in_flight >= total.most
            or full_s > now_s + total.slack_s
            or (total.has_debts and total.is_owing(now_s))
        ):
            return False
        own = self.own
        if own is not None and own.is_used_up(self.in_flight, now_s):
            return False
        if (
            gate.is_shared
            and (gate.owner is not self or gate.in_flight >= gate.limit.now)
            and (gate.waiting or not gate.pass_one(self, now_s))
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
        figures = self.figures
        figures.admitted += 1
        figures.input_bytes += size_bytes
        return True

    def end(self) -> None:
        self.in_flight -= 1
        self.total.in_flight -= 1
        gate = self.gate
        gate.in_flight -= 1
        if gate.waiting:
            gate.let_in()

    def take_back(self, size_bytes: int) -> None:
        """Its turn in the gate is not given back: the request takes another one."""
        now_s = self.gate.clock()
        for account in (self.total, self.own):
            if account is not None:
                account.full_s -= account.step_s
                if account.input_bytes is not None:
                    account.input_bytes.take(-size_bytes, now_s)
        self.figures.admitted -= 1
        self.figures.input_bytes -= size_bytes
        self.end()

    def ended(self, outcome: Outcome) -> None:
        self.in_flight -= 1
        self.total.in_flight -= 1
        gate = self.gate
        gate.in_flight -= 1
        if gate.waiting:
            gate.let_in()

    def charge_tokens(self, tokens: int) -> None:
        """Count the output tokens of a response."""
        now_s = self.gate.clock()
        self.figures.tokens += tokens
        if self.total.tokens is not None:
            self.total.tokens.take(tokens, now_s)
        if self.own is not None and self.own.tokens is not None:
            self.own.tokens.take(tokens, now_s)

    def is_idle(self, now_s: float) -> bool:
        """True if it can be forgotten: whatever it would refuse, a new one would refuse, too."""
        if self.in_flight or not (self.own is None or self.own.is_whole(now_s)):
            return False
        return self.tenant.uses > 1 or self.total.is_whole(now_s)


class FairGate:
    """The requests of one model, those of a model without ``sharing`` without a limit.

    ``uses`` is the number of `Use` objects that have it.
    """

    __slots__ = (
        "_heap", "_latest", "_number", "_virtual", "clock", "has_rows", "in_flight", "is_followed", "is_shared",
        "limit", "model", "owner", "quick", "reports_tokens", "sharing", "uses", "view", "waiting", "waiting_bytes",
    )  # fmt: skip

    def __init__(
        self, model: str, sharing: Sharing | None, clock: Callable[[], float], is_followed: bool = True
    ) -> None:
        """Create the gate. If it ``is_followed``, `learn` and `settle` are called."""
        self.model, self.clock, self.uses, self.in_flight = model, clock, 0, 0
        self.waiting = self.waiting_bytes = 0
        self.limit = GateLimit(clock)
        #: The version that was asked last. None before the model is known.
        self.view: ModelView | None = None
        #: The version whose requests `Use.begin` counts: ``view``, unless its responses have tokens to count.
        self.quick: ModelView | None = None
        self.is_followed = is_followed
        #: True if responses are looked at for tokens.
        self.reports_tokens = False
        #: True if a request counts as many times as it has rows.
        self.has_rows = False
        self._heap: list[tuple[float, int, Use]] = []
        #: The virtual time, and the latest finish.
        self._virtual = self._latest = 0.0
        self._number = count()
        #: The use that came last.
        self.owner: Use | None = None
        self.follow(sharing)

    def follow(self, sharing: Sharing | None) -> None:
        """Use other settings."""
        self.sharing, self.is_shared = sharing or Sharing(), sharing is not None
        self.limit.follow(self.sharing.in_flight if self.is_shared else maxsize)
        if self.view is not None:
            self.learn(self.view, self.reports_tokens)
        self.let_in()

    def learn(self, view: ModelView, reports_tokens: bool) -> None:
        """Note a version that is being asked."""
        self.view, self.reports_tokens = view, reports_tokens
        self.quick = None if reports_tokens else view
        self.has_rows = self.is_shared and view.max_batch_size > 0
        self.limit.learn(view)
        self.let_in()

    def settle(self) -> bool:
        """Choose again how many are let in. Return False if that must be done soon."""
        is_settled = self.limit.settle()
        if is_settled:
            self.view = self.quick = None  # the next request says which version is asked
        if not (self.limit.is_shared or self.waiting):
            self.owner, self._virtual = None, self._latest  # nobody owes anything for the past
        self.let_in()
        return is_settled

    # ------------------------------------------------------------------ requests

    def pass_one(self, use: Use, now_s: float) -> bool:
        """True if a request of ``use`` may be let in now. The caller then counts it as in flight. Else it must wait.

        Not asked while ``use`` has the model for itself and the gate has room: then nobody loses anything.
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
        """Charge ``more`` rows of a request of ``use``: all but the first one, which was charged when it came in."""
        use.finish += more * use.step
        self._latest = max(self._latest, use.finish)

    def _charge(self, use: Use, start: float) -> None:
        self._virtual, use.finish = start, start + use.step
        self._latest = max(self._latest, use.finish)

    def refusal(self, use: Use, size_bytes: int) -> QuotaRefusal | None:
        """Return why a request of ``use`` may not wait; None if it may.

        In a full queue, a use that waits with less than others takes the place of the newest request of the one that
        waits with the most.
        """
        while not self._has_room(size_bytes):
            share = self.waiting / max(1, len(self._heap)) / use.step
            if len(use.waiting or ()) > share:  # far from the least, so the others need not be compared
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
        """Return the part of the queue that ``use`` has, with ``more`` requests, over its weight."""
        waiting = use.waiting or ()
        size_bytes = sum([waiter.size_bytes for waiter in waiting]) + more_bytes
        part = max((len(waiting) + more) / self.sharing.max_waiting, size_bytes / self.sharing.max_waiting_bytes)
        return part * use.step

    def _full(self) -> QuotaRefusal:
        text = f"{self.waiting} requests wait for model '{self.model}', which is the limit"
        return QuotaRefusal("queue_full", text, RETRY_S)

    def queue(self, waiter: QueuedRequest) -> None:
        """Let ``waiter`` wait for its turn."""
        use = waiter.use
        if use.waiting is None:
            use.waiting = OrderedDict()
        use.waiting[waiter] = None
        self.waiting += 1
        self.waiting_bytes += waiter.size_bytes
        if not use.is_queued:
            use.is_queued = True
            heappush(self._heap, (max(use.finish, self._virtual), next(self._number), use))

    def leave(self, waiter: QueuedRequest) -> bool:
        """Remove a waiter. Return False if it did not wait any more."""
        waiting = waiter.use.waiting
        if waiting is None or waiting.pop(waiter, self) is self:
            return False
        self.waiting -= 1
        self.waiting_bytes -= waiter.size_bytes
        return True

    def let_in(self) -> None:
        """Let in the requests whose turn it is."""
        heap = self._heap
        while heap and self.in_flight < self.limit.now:
            start, _, use = heappop(heap)
            use.is_queued = False
            if not use.waiting:
                continue
            if start >= use.finish:
                self._charge(use, max(start, self._virtual))
                waiter = next(iter(use.waiting))
                self.leave(waiter)
                self.in_flight += 1
                waiter.let_in()
            if use.waiting:
                use.is_queued = True
                heappush(heap, (use.finish, next(self._number), use))


class QueuedRequest(Watch):
    """A request that waits in a gate, or was let in after it had waited. It watches the request in place of its use."""

    __slots__ = ("_is_over", "_since_s", "_timer", "_watch", "future", "is_in", "size_bytes", "use")

    def __init__(self, use: Use, caller: Caller, watch: Watch) -> None:
        """Begin to wait. The `ended` of this watch must follow, or the future be cancelled. ``watch`` is told, too."""
        loop = asyncio.get_running_loop()
        gate = use.gate
        self.use, self._watch, self.size_bytes = use, watch, caller.body_bytes
        self.is_in = self._is_over = False
        self.future: asyncio.Future[None] = loop.create_future()
        self.future.add_done_callback(self._left)
        self._since_s = gate.clock()
        # The hosts of gRPC end calls at their deadline themselves.
        left_s = (caller.deadline_ns / 1e9 - self._since_s) if caller.deadline_ns and caller.transport != "grpc" else 0
        wait_s = gate.sharing.max_wait_seconds
        if left_s and left_s < wait_s:
            self._timer = loop.call_later(max(0.0, left_s), self._expire)
        else:
            self._timer = loop.call_later(wait_s, self.refuse, QuotaRefusal("waited", self._text(wait_s), RETRY_S))
        gate.queue(self)

    def _text(self, wait_s: float) -> str:
        return f"the request has waited {wait_s:g} s for a share of model '{self.use.model}', which is the limit"

    def let_in(self) -> None:
        """Let the request go on. The gate has counted it."""
        self.is_in = True
        self._stop_waiting()
        if not self.future.done():
            self.future.set_result(None)

    def refuse(self, refusal: QuotaRefusal) -> None:
        """Refuse a request that waits."""
        self.use.tenant.figures.refused[refusal.reason] += 1
        self._fail(ResourceExhausted(refusal.text, retry_after_s=refusal.retry_s))

    def _expire(self) -> None:
        self._fail(Unavailable("Request timeout expired"))  # the words of a queue

    def _fail(self, error: HeadraceError) -> None:
        if self.use.gate.leave(self):
            self._stop_waiting()
            if not self.future.done():
                self.future.set_exception(error)
                self.future.exception()  # nobody may be left to retrieve it

    def _stop_waiting(self) -> None:
        self._timer.cancel()
        self.use.tenant.figures.waited_s += self.use.gate.clock() - self._since_s

    def ended(self, outcome: Outcome) -> None:
        if self._is_over:
            return
        self._is_over = True
        if not self.is_in:
            if self.use.gate.leave(self):
                self._stop_waiting()
            self.use.gate.in_flight += 1  # which `Use.ended` takes back
        self.future.cancel()
        self._watch.ended(outcome)

    def _left(self, future: asyncio.Future[None]) -> None:
        """End a request whose caller was cancelled while it waited."""
        if future.cancelled() and not self._is_over:
            self.ended(Outcome(None, 0, 0))
