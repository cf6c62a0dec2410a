"""The interceptor ``quotas``: counts the use of each caller, refuses requests beyond its quota, and shares models.

::

    Use.begin        a request like an admitted one: counts it, or returns False for `admit`
    Quotas.admit     before the body is read: refuses, admits, or queues in the gate of the model
    Use.answered     counts tokens
    Use.ended, end   no longer in flight: the gate admits the next one
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
from headrace_quotas.counters import Labelled, PrincipalCounters
from headrace_quotas.fair_gate import QueuedRequest, Use
from headrace_quotas.output_tokens import TokenCounter, reports_tokens, requesting_tokens
from headrace_quotas.quota_file import Quota, QuotaBook, QuotaLimits
from headrace_quotas.quota_file_watcher import QuotaFileWatcher
from headrace_quotas.quota_options import QuotaOptions
from headrace_quotas.use_table import UseTable

_INFER = Operation.INFER
_INSIDE = frozenset(("program", "model"))
#: A tenant gets 20 refusals at once, then 20 per second. All others are delayed, so that a caller that retries in a
#: loop does not take the server's time from others.
_PROMPT_REFUSALS, _REFUSALS_PER_S = 20, 20
#: The maximum delay of a refusal, and the maximum number of delayed refusals.
_LATEST_S, _MAX_LATE = 1.0, 10_000
#: The interval at which limits of gates are recomputed and the file is checked. Shorter until an execution is measured.
_TICK_S, _SOON_S = 1.0, 0.05
#: The number of IPv6 addresses whose network is cached.
_MAX_NETWORKS = 4096


class Quotas(Interceptor):
    """Limits the inferences of each caller: a principal if an earlier interceptor has named it, else an address.

    Calls between models are part of the inference of their caller, and are not counted.
    """

    name: ClassVar[str] = "quotas"

    def __init__(self, options: ServerOptions, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(options)
        settings, self._clock = options.group(QuotaOptions), clock
        limits = QuotaLimits(settings.rate or None, settings.burst or None, settings.in_flight or None)
        self._has_limits, self._delayed = bool(settings.rate or settings.in_flight), 0
        self._workers = max(1, options.workers)
        quota = Quota(limits)
        book = QuotaBook(quota, anonymous=quota)
        self._watcher: QuotaFileWatcher | None = None
        if settings.file:
            self._watcher = QuotaFileWatcher(Path(settings.file), self._follow)
            book = self._watcher.book
        self.counters = PrincipalCounters(settings.tenants, book.named)
        self.table = UseTable(book.divided(self._workers), self.counters, clock, self._watcher is not None)
        self._uses, self._gates = self.table.uses, self.table.gates
        self.meters = self._uses
        self._networks: dict[str, tuple[str]] = {}
        self._is_ticking, self._tick_s = False, _SOON_S

    @property
    def enabled(self) -> bool:
        return self._has_limits or self._watcher is not None

    def allowed_callers(self, operation: AnyOperation, transport: str) -> str:
        return ""

    async def _follow(self, book: QuotaBook) -> None:
        await self.table.update(book.divided(self._workers))

    # ------------------------------------------------------------------ admission

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | Awaitable[None] | None:
        is_inner = False
        if operation is not _INFER or caller.parent is not None or caller.transport in _INSIDE:
            if not is_counted(caller, operation):
                return None
            is_inner = caller.parent is not None and _has_counted(caller.parent)
            if operation is not _INFER and operation is not Operation.GENERATE:
                model = ""  # each of its inferences is admitted with its own model
        use = self._uses.get((caller.principal or self._address(caller.peer), model))
        if use is None:
            use = self._add(caller.principal or self._address(caller.peer), model)
        now_s, total, size_bytes = self._clock(), use.total, caller.body_bytes
        if is_inner:
            return self._admit_inner(caller, use, now_s)
        if (
            total.in_flight >= total.max_in_flight
            or total.full_s > now_s + total.slack_s
            or (total.has_debts and total.is_in_debt(now_s))
        ):
            return self._refuse(use, total.refusal(use.tenant.who, total.in_flight, now_s), now_s)
        own = use.own
        if own is not None and own.is_used_up(use.in_flight, now_s):
            return self._refuse(use, own.refusal(use.who, use.in_flight, now_s), now_s)
        gate, waits = use.gate, False
        if gate.is_shared and (gate.owner is not use or gate.in_flight >= gate.limit.now):
            waits = not gate.try_admit(use, now_s)
            if waits and (refusal := gate.refusal(use, size_bytes)) is not None:
                return self._refuse(use, refusal, now_s)
        total.full_s = (total.full_s if total.full_s > now_s else now_s) + total.step_s
        if total.input_bytes is not None:
            total.input_bytes.take(size_bytes, now_s)
        if own is not None:
            own.take(size_bytes, now_s)
        total.in_flight += 1
        use.in_flight += 1
        counters = use.counters
        counters.admitted += 1
        counters.input_bytes += size_bytes
        if waits:
            return self._wait(caller, use, use)
        gate.in_flight += 1
        return use

    def _admit_inner(self, caller: Caller, use: Use, now_s: float) -> Watch | Awaitable[None] | None:
        """Admit an inference of an operation that is already counted: check the limits and the gate of the model
        only."""
        own, gate = use.own, use.gate
        if own is not None and own.is_used_up(use.in_flight, now_s):
            return self._refuse(use, own.refusal(use.who, use.in_flight, now_s), now_s)
        waits = gate.is_shared and not gate.try_admit(use, now_s)
        if waits and (refusal := gate.refusal(use, caller.body_bytes)) is not None:
            return self._refuse(use, refusal, now_s)
        if own is not None:
            own.take(caller.body_bytes, now_s)
        use.in_flight += 1
        if waits:
            return self._wait(caller, use, InnerInference(use))
        gate.in_flight += 1
        return InnerInference(use)

    def _add(self, key: TenantKey, model: str) -> Use:
        if not self._is_ticking and self._watcher is not None:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(self._tick_s, self._tick)
        return self.table.add(key, model)

    def _tick(self) -> None:
        """Recompute the limits of the gates, and read a changed quota file."""
        if self._watcher is not None:
            self._watcher.poll()
        unsettled = [gate for gate in self.table.gates.values() if not gate.recompute()]
        self._tick_s = min(_TICK_S, 2 * self._tick_s if unsettled else _TICK_S)
        asyncio.get_running_loop().call_later(self._tick_s, self._tick)

    def _wait(self, caller: Caller, use: Use, watch: Watch) -> Awaitable[None]:
        """Queue a counted request. When it ends, its wait ends, even if nothing awaits the result."""
        waiter = QueuedRequest(use, caller, watch)
        caller.watch(waiter)
        return waiter.future

    def _refuse(self, use: Use, refusal: QuotaRefusal, now_s: float) -> Awaitable[None]:
        """Raise the refusal. If the tenant was just refused many times, return an awaitable that raises it later."""
        tenant = use.tenant
        tenant.counters.refused[refusal.reason] += 1
        error = ResourceExhausted(refusal.text, retry_after_s=refusal.retry_s)
        refusal_s = max(tenant.next_refusal_s, now_s)
        late_s = min(refusal_s - now_s - _PROMPT_REFUSALS / _REFUSALS_PER_S, _LATEST_S)
        if late_s < _LATEST_S:
            tenant.next_refusal_s = refusal_s + 1 / _REFUSALS_PER_S
        if late_s <= 0 or self._delayed >= _MAX_LATE:
            raise error
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._delayed += 1
        loop.call_later(late_s, self._refuse_now, future, error)
        return future

    def _refuse_now(self, future: asyncio.Future[None], error: ResourceExhausted) -> None:
        self._delayed -= 1
        if not future.done():
            future.set_exception(error)
            future.exception()  # marked as retrieved: nothing may await it any more

    def _address(self, peer: str) -> tuple[str]:
        """Return the key of a caller without a principal: its IPv4 address or IPv6 network.

        One host has 2^64 IPv6 addresses.
        """
        if ":" not in peer:
            return (peer,)
        found = self._networks.get(peer)
        if found is None:
            if len(self._networks) >= _MAX_NETWORKS:
                self._networks.clear()
            found = self._networks[peer] = (network_of(peer),)
        return found

    # ------------------------------------------------------------------ requests

    def intercept(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        gate = self._gates.get(model.name)
        if gate is None or self._watcher is None:
            return None
        if gate.view is not model:
            gate.observe(model, reports_tokens(model))
        if gate.waiting and gate.has_rows:
            for tensor in request.inputs.values():
                shape = tensor.shape
                if shape and shape[0] > 1 and (use := self._use_of(caller)) is not None:
                    gate.charge_rows(use, min(shape[0], model.max_batch_size) - 1)  # a larger batch is refused later
                break
        return self._count_tokens(request, model, caller) if gate.reports_tokens else None

    def _count_tokens(self, request: InferRequest, model: ModelView, caller: Caller) -> InferRequest | None:
        use = self._use_of(caller)
        if use is None:
            return None
        caller.watch(TokenCounter(use))
        return requesting_tokens(request, model) if use.has_token_limit else None

    def _use_of(self, caller: Caller) -> Use | None:
        if caller.transport in _INSIDE:
            return None
        return self._uses.get((caller.principal or self._address(caller.peer), caller.model))

    # ------------------------------------------------------------------ metrics

    def publishers(self) -> Iterable[Labelled]:
        return self.counters.publishers(self.table.in_flight(), dict(self.table.waiting()))


class InnerInference(Watch):
    """Watches an inference within an operation that already counts for the tenant."""

    __slots__ = ("_use",)

    def __init__(self, use: Use) -> None:
        self._use = use

    def ended(self, outcome: Outcome) -> None:
        self._use.total.in_flight += 1  # `Use.ended` subtracts it
        self._use.ended(outcome)


def network_of(peer: str) -> str:
    """Return the /64 network of an IPv6 address, the IPv4 address of a mapped one, and any other text unchanged."""
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
    """True for an inference from outside. Each request on a gRPC stream counts; the stream itself does not."""
    return (
        caller.transport not in _INSIDE and operation is not Operation.OPEN_STREAM and operation.category == "inference"
    )


def _has_counted(parent: Caller) -> bool:
    """True if the operation of ``parent`` is counted, so that its inferences are part of it."""
    return parent.operation is not None and is_counted(parent, parent.operation)
