"""The uses of a server, by tenant and model. Those that are whole again are forgotten when others come."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator

from headrace_quotas.accounts import Tenant, TenantKey
from headrace_quotas.fair_gate import FairGate, Use
from headrace_quotas.figures import AllFigures
from headrace_quotas.quota_file import QuotaBook

#: So many uses are kept although they can be forgotten.
KEPT = 20_000
#: Each further use looks at this many of the oldest ones, and removes those that can be forgotten.
_LOOKED_AT = 2
#: At most this many uses, or a little more: then one without requests in flight is forgotten although it is not whole.
MOST_USES = 100_000
_TRIES = 16
#: So many tenants or uses get other quotas in one turn of the event loop.
_PER_TURN = 200


class UseTable:
    """Finds the `Use` of a tenant with a model. Event loop only."""

    def __init__(self, book: QuotaBook, figures: AllFigures, clock: Callable[[], float], follows: bool = True) -> None:
        """Create the table. Its gates are followed if it ``follows`` a file: only that has shared models."""
        self.book, self._figures, self._clock, self._follows = book, figures, clock, follows
        self.uses: OrderedDict[tuple[TenantKey, str], Use] = OrderedDict()
        self.tenants: dict[TenantKey, Tenant] = {}
        self.gates: dict[str, FairGate] = {}

    async def follow(self, book: QuotaBook) -> None:
        """Use the quotas of another file, for many uses in several turns of the event loop."""
        self.book = book
        for number, tenant in enumerate(tuple(self.tenants.values())):
            tenant.follow(book, self._clock())
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
        for number, use in enumerate(tuple(self.uses.values())):
            use.follow(self._clock())
            if number % _PER_TURN == 0:
                await asyncio.sleep(0)
        for model, gate in tuple(self.gates.items()):
            gate.follow(book.sharing_of(model) if model else None)

    def add(self, tenant_key: TenantKey, model: str) -> Use:
        """Return a new use, and forget old ones."""
        now_s = self._clock()
        self._forget(now_s)
        tenant = self.tenants.get(tenant_key)
        if tenant is None:
            figures = self._figures.of(tenant_key if isinstance(tenant_key, str) else "")
            tenant = self.tenants[tenant_key] = Tenant(tenant_key, self.book, figures, now_s)
        gate = self.gates.get(model)
        if gate is None:
            sharing = self.book.sharing_of(model) if model else None
            gate = self.gates[model] = FairGate(model, sharing, self._clock, self._follows)
        use = self.uses[tenant_key, model] = Use(tenant, model, gate, now_s)
        tenant.uses += 1
        gate.uses += 1
        return use

    def in_flight(self) -> dict[str, float]:
        """Return the requests in flight by label of the metrics page."""
        labels = {id(figures): label for label, figures in self._figures.by_label.items()}
        found: dict[str, float] = {}
        for tenant in self.tenants.values():
            label = labels[id(tenant.figures)]
            found[label] = found.get(label, 0) + tenant.account.in_flight
        return found

    def waiting(self) -> Iterator[tuple[str, float]]:
        """Yield the models that are shared, each with the requests that wait for it."""
        return ((model, gate.waiting) for model, gate in self.gates.items() if gate.is_shared and gate.in_flight)

    def _forget(self, now_s: float) -> None:
        for _ in range(_LOOKED_AT if len(self.uses) >= KEPT else 0):
            key = next(iter(self.uses), None)
            if key is None:
                return
            if self.uses[key].is_idle(now_s):
                self._remove(key)
            else:
                self.uses.move_to_end(key)
        for _ in range(_TRIES if len(self.uses) >= MOST_USES else 0):
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
