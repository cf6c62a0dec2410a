"""The interceptor ``quotas``: counts what each caller uses, refuses what is beyond its quota, and shares models.

::

    Use.begin        a request like one that was admitted: counts it, or leaves it to the others
    Quotas.admit     before the body is read: refuses, lets pass, or lets wait in the gate of the model
    Use.answered     counts tokens
    Use.ended, end   in flight no more: the gate lets in the next one
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from time import monotonic
from typing import ClassVar

from headrace import (
    AnyOperation,
    Caller,
    InferRequest,
    Interceptor,
    ModelView,
    Operation,
    Outcome,
    ResourceExhausted,
    ServerOptions,
    Watch,
)
from headrace_quotas.accounts import QuotaRefusal, TenantKey
from headrace_quotas.fair_gate import QueuedRequest, Use
from headrace_quotas.figures import AllFigures, Labelled
from headrace_quotas.output_tokens import TokenCounter, asking_for_tokens, reports_tokens
from headrace_quotas.quota_file import Quota, QuotaBook, QuotaLimits
from headrace_quotas.quota_file_watcher import QuotaFileWatcher
from headrace_quotas.quota_options import QuotaOptions
from headrace_quotas.use_table import UseTable

_INFER = Operation.INFER
_INSIDE = frozenset(("program", "model"))
#: So many refusals of a tenant are answered at once, and then so many per second. All others are answered later, so
#: that a caller that asks again and again does not take the server's time from others.
_PROMPT_REFUSALS, _REFUSALS_PER_S = 20, 20
#: The longest that a refusal waits, and the most that wait.
_LATEST_S, _MOST_LATE = 1.0, 10_000
#: How often the gates are settled and a changed file is searched. Sooner while nothing has been executed yet.
_TICK_S, _SOON_S = 1.0, 0.05
#: The IPv6 addresses whose network is remembered.
_MOST_NETWORKS = 4096


class Quotas(Interceptor):
    """Limits the inferences of each caller: of a principal, if an interceptor before this one has named it, or else of
    an address. What models ask on behalf of a caller is part of its inference, and is not counted."""

    name: ClassVar[str] = "quotas"

    def __init__(self, options: ServerOptions, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(options)
        given, self._clock = options.group(QuotaOptions), clock
        limits = QuotaLimits(given.rate or None, given.burst or None, given.in_flight or None)
        self._has_limits, self._late = bool(given.rate or given.in_flight), 0
        self._workers = max(1, options.workers)
        quota = Quota(limits)
        book = QuotaBook(quota, anonymous=quota)
        self._watcher: QuotaFileWatcher | None = None
        if given.file:
            self._watcher = QuotaFileWatcher(Path(given.file), self._follow)
            book = self._watcher.book
        self.figures = AllFigures(given.tenants, book.named)
        self.table = UseTable(book.divided(self._workers), self.figures, clock, self._watcher is not None)
        self._uses, self._gates = self.table.uses, self.table.gates
        self.meters = self._uses
        self._networks: dict[str, tuple[str]] = {}
        self._is_ticking, self._tick_s = False, _SOON_S

    @property
    def enabled(self) -> bool:
        return self._has_limits or self._watcher is not None

    def who_may(self, operation: AnyOperation, transport: str) -> str:
        return ""

    async def _follow(self, book: QuotaBook) -> None:
        await self.table.follow(book.divided(self._workers))

    # ------------------------------------------------------------------ admission

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | Awaitable[None] | None:
        is_part = False
        if operation is not _INFER or caller.parent is not None or caller.transport in _INSIDE:
            if not is_counted(caller, operation):
                return None
            is_part = caller.parent is not None and _has_counted(caller.parent)
            if operation is not _INFER and operation is not Operation.GENERATE:
                model = ""  # its inferences are admitted by themselves, with their model
        use = self._uses.get((caller.principal or self._address(caller.peer), model))
        if use is None:
            use = self._add(caller.principal or self._address(caller.peer), model)
        now_s, total, size_bytes = self._clock(), use.total, caller.body_bytes
        if is_part:
            return self._admit_part(caller, use, now_s)
        if (
            total.in_flight >= total.most
            or total.full_s > now_s + total.slack_s
            or (total.has_debts and total.is_owing(now_s))
        ):
            return self._refuse(use, total.refusal(use.tenant.who, total.in_flight, now_s), now_s)
        own = use.own
        if own is not None and own.is_used_up(use.in_flight, now_s):
            return self._refuse(use, own.refusal(use.who, use.in_flight, now_s), now_s)
        gate, waits = use.gate, False
        if gate.is_shared and (gate.owner is not use or gate.in_flight >= gate.limit.now):
            waits = not gate.pass_one(use, now_s)
            if waits and (refusal := gate.refusal(use, size_bytes)) is not None:
                return self._refuse(use, refusal, now_s)
        total.full_s = (total.full_s if total.full_s > now_s else now_s) + total.step_s
        if total.input_bytes is not None:
            total.input_bytes.take(size_bytes, now_s)
        if own is not None:
            own.take(size_bytes, now_s)
        total.in_flight += 1
        use.in_flight += 1
        figures = use.figures
        figures.admitted += 1
        figures.input_bytes += size_bytes
        if waits:
            return self._wait(caller, use, use)
        gate.in_flight += 1
        return use

    def _admit_part(self, caller: Caller, use: Use, now_s: float) -> Watch | Awaitable[None] | None:
        """Admit an inference of an operation that was counted: by the limits of the model and its gate."""
        own, gate = use.own, use.gate
        if own is not None and own.is_used_up(use.in_flight, now_s):
            return self._refuse(use, own.refusal(use.who, use.in_flight, now_s), now_s)
        waits = gate.is_shared and not gate.pass_one(use, now_s)
        if waits and (refusal := gate.refusal(use, caller.body_bytes)) is not None:
            return self._refuse(use, refusal, now_s)
        if own is not None:
            own.take(caller.body_bytes, now_s)
        use.in_flight += 1
        if waits:
            return self._wait(caller, use, Part(use))
        gate.in_flight += 1
        return Part(use)

    def _add(self, key: TenantKey, model: str) -> Use:
        if not self._is_ticking and self._watcher is not None:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return self.table.add(key, model)

    def _tick(self) -> None:
        """Choose again how many requests the gates let in, and read a changed quota file."""
        if self._watcher is not None:
            self._watcher.look()
        unsettled = [gate for gate in self.table.gates.values() if not gate.settle()]
        self._tick_s = min(_TICK_S, 2 * self._tick_s if unsettled else _TICK_S)
        asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _wait(self, caller: Caller, use: Use, watch: Watch) -> Awaitable[None]:
        """Let a request wait that is counted. Its end ends the wait, whether or not somebody awaits the result."""
        waiter = QueuedRequest(use, caller, watch)
        caller.watch(waiter)
        return waiter.future

    def _refuse(self, use: Use, refusal: QuotaRefusal, now_s: float) -> Awaitable[None]:
        """Raise the refusal, or let the caller wait for it if the tenant was refused many times just before."""
        tenant = use.tenant
        tenant.figures.refused[refusal.reason] += 1
        error = ResourceExhausted(refusal.text, retry_after_s=refusal.retry_s)
        begun_s = max(tenant.paced_s, now_s)
        late_s = min(begun_s - now_s - _PROMPT_REFUSALS / _REFUSALS_PER_S, _LATEST_S)
        if late_s < _LATEST_S:
            tenant.paced_s = begun_s + 1 / _REFUSALS_PER_S
        if late_s <= 0 or self._late >= _MOST_LATE:
            raise error
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._late += 1
        loop.call_later(late_s, self._refuse_now, future, error)
        return future

    def _refuse_now(self, future: asyncio.Future[None], error: ResourceExhausted) -> None:
        self._late -= 1
        if not future.done():
            future.set_exception(error)
            future.exception()  # nobody may be left to retrieve it

    def _address(self, peer: str) -> tuple[str]:
        """Return the key of a caller without a principal: its address, or the network of an IPv6 address, of which
        one host has 2^64."""
        if ":" not in peer:
            return (peer,)
        found = self._networks.get(peer)
        if found is None:
            if len(self._networks) >= _MOST_NETWORKS:
                self._networks.clear()
            found = self._networks[peer] = (network_of(peer),)
        return found

    # ------------------------------------------------------------------ requests

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        gate = self._gates.get(model.name)
        if gate is None or self._watcher is None:
            return None
        if gate.view is not model:
            gate.learn(model, reports_tokens(model))
        if gate.waiting and gate.has_rows:
            for tensor in request.inputs.values():
                shape = tensor.shape
                if shape and shape[0] > 1 and (use := self._use_of(caller)) is not None:
                    gate.charge_rows(use, min(shape[0], model.max_batch_size) - 1)  # more are refused later
                break
        return self._count_tokens(request, model, caller) if gate.reports_tokens else None

    def _count_tokens(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        use = self._use_of(caller)
        if use is None:
            return None
        caller.watch(TokenCounter(use))
        return asking_for_tokens(request, model) if use.has_token_limit else None

    def _use_of(self, caller: Caller) -> Use | None:
        if caller.transport in _INSIDE:
            return None
        return self._uses.get((caller.principal or self._address(caller.peer), caller.model))

    # ------------------------------------------------------------------ metrics

    def publishers(self) -> Iterable[Labelled]:
        return self.figures.publishers(self.table.in_flight(), dict(self.table.waiting()))


class Part(Watch):
    """Watches an inference that is part of an operation, which counts by itself for the tenant."""

    __slots__ = ("_use",)

    def __init__(self, use: Use) -> None:
        self._use = use

    def ended(self, outcome: Outcome) -> None:
        self._use.total.in_flight += 1  # which `Use.ended` takes back
        self._use.ended(outcome)


def network_of(peer: str) -> str:
    """Return the /64 network of an IPv6 address; an IPv4 address in one as itself; anything else unchanged."""
    try:
        address = ip_address(peer.partition("%")[0].strip("[]"))
    except ValueError:
        return peer
    if not isinstance(address, IPv6Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{IPv6Address(int(address) >> 64 << 64)}/64"


def is_counted(caller: Caller, operation: AnyOperation) -> bool:
    """True for an inference from outside. Each request on a gRPC stream is one; the stream itself is none."""
    return (
        caller.transport not in _INSIDE and operation is not Operation.OPEN_STREAM and operation.category == "inference"
    )


def _has_counted(parent: Caller) -> bool:
    """True if the operation of ``parent`` was counted, so that its inferences are part of it."""
    return parent.operation is not None and is_counted(parent, parent.operation)
