"""The uses of a server by tenant and model. Unused ones are removed when new ones are added."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator

from headrace_quotas.accounts import Tenant, TenantKey
from headrace_quotas.counters import PrincipalCounters
from headrace_quotas.fair_gate import FairGate, Use
from headrace_quotas.quota_file import QuotaBook

#: This many uses are kept even if they could be removed.
KEEP = 20_000
#: Each further use examines this many of the oldest ones, and removes those that are unused.
_EXAMINED = 2
#: From this many uses on, one without requests in flight is removed even if it is in debt.
MAX_USES = 100_000
_TRIES = 16
#: This many tenants or uses are updated in one turn of the event loop.
_PER_TURN = 200


class UseTable:
    """Finds the `Use` of a tenant with a model. Event loop only."""

    def __init__(
        self, book: QuotaBook, counters: PrincipalCounters, clock: Callable[[], float], has_file: bool = True
    ) -> None:
        """Create the table. Gates are observed only if the quotas come from a file: only a file can share models."""
        self.book, self._counters, self._clock, self._has_file = book, counters, clock, has_file
        self.uses: OrderedDict[tuple[TenantKey, str], Use] = OrderedDict()
        self.tenants: dict[TenantKey, Tenant] = {}
        self.gates: dict[str, FairGate] = {}

    async def update(self, book: QuotaBook) -> None:
        """Use the quotas of ``book``. Many uses are updated in several turns of the event loop."""
        self.book = book
        for number, tenant in enumerate(tuple(self.tenants.values())):
            tenant.update(book, self._clock())
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
        for number, use in enumerate(tuple(self.uses.values())):
            use.update(self._clock())
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
        for model, gate in tuple(self.gates.items()):
            gate.update(book.sharing_of(model) if model else None)

    def add(self, tenant_key: TenantKey, model: str) -> Use:
        """Return a new use, and remove old ones."""
        now_s = self._clock()
        self._remove_unused(now_s)
        tenant = self.tenants.get(tenant_key)
        if tenant is None:
            counters = self._counters.of(tenant_key if isinstance(tenant_key, str) else "")
            tenant = self.tenants[tenant_key] = Tenant(tenant_key, self.book, counters, now_s)
        gate = self.gates.get(model)
        if gate is None:
            sharing = self.book.sharing_of(model) if model else None
            gate = self.gates[model] = FairGate(model, sharing, self._clock, self._has_file)
        use = self.uses[tenant_key, model] = Use(tenant, model, gate, now_s)
        tenant.uses += 1
        gate.uses += 1
        return use

    def in_flight(self) -> dict[str, float]:
        """Return the requests in flight by label of the metrics page."""
        labels = {id(counters): label for label, counters in self._counters.by_label.items()}
        found: dict[str, float] = {}
        for tenant in self.tenants.values():
            label = labels[id(tenant.counters)]
            found[label] = found.get(label, 0) + tenant.account.in_flight
        return found

    def waiting(self) -> Iterator[tuple[str, float]]:
        """Yield each shared model with the number of requests that wait for it."""
        return ((model, gate.waiting) for model, gate in self.gates.items() if gate.is_shared and gate.in_flight)

    def _remove_unused(self, now_s: float) -> None:
        for _ in range(_EXAMINED if len(self.uses) >= KEEP else 0):
            key = next(iter(self.uses), None)
            if key is None:
                return
            if self.uses[key].is_idle(now_s):
                self._remove(key)
            else:
                self.uses.move_to_end(key)
        for _ in range(_TRIES if len(self.uses) >= MAX_USES else 0):
            key = next(iter(self.uses))
            if not self.uses[key].in_flight:
                self._remove(key)
                return
            self.uses.move_to_end(key)

    def _remove(self, key: tuple[TenantKey, str]) -> None:
        use = self.uses.pop(key)
        use.tenant.uses -= 1
        if not use.tenant.uses:
            del self.tenants[use.tenant.key]
        use.gate.uses -= 1
        if not use.gate.uses:
            del self.gates[use.model]
