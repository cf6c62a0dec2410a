"""Loads and evictions: one load per model, within the budget.

::

    begin -> _load -> _closure     the model and what it needs, as the repository has them now
                   -> _make_room   in line: the first one evicts idle models, or waits for them; then charges
                   -> models.load  several at once
                   -> _settle      charges what was measured
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic, monotonic_ns

from headrace import (
    ConfigError,
    HeadraceError,
    InternalError,
    LoadableModel,
    LoadControl,
    LoadError,
    Unavailable,
    rate_limited_logger,
    release_memory,
)
from headrace_on_demand.memory import ServerMemory, process_bytes
from headrace_on_demand.memory_budget import HOST, MemoryBudget
from headrace_on_demand.memory_estimates import MemoryEstimates
from headrace_on_demand.model_state import FailedLoad, ModelState, shown
from headrace_on_demand.on_demand_options import OnDemandOptions, read_settings

log = rate_limited_logger(__name__)

#: The loads at the head of the line that may get room. The others only wait for their turn.
_LOOKED_AT = 8


class Loads:
    """Loads and evicts models. Event loop only. ``models`` is set before the first call."""

    models: LoadControl

    def __init__(self, options: OnDemandOptions) -> None:
        self._options, self._pinned_names = options, frozenset(options.pinned_names)
        self.budget = MemoryBudget(options.limits)
        #: The models that were asked for, by name.
        self.states: dict[str, ModelState] = {}
        #: Those that take requests now.
        self.open: dict[str, ModelState] = {}
        self.loaded = self.failures = self.evictions = 0
        self.server = ServerMemory()
        #: The loads that wait for room, the first one first.
        self._line: list[_WaitingLoad] = []
        #: Set when a model has become idle, has left, or was loaded: a load that waits for room looks again.
        self._moved = asyncio.Event()
        self._estimates = MemoryEstimates(self.budget)
        self._has_stopped = False

    def state(self, name: str) -> ModelState:
        """Return what is known of ``name``."""
        found = self.states.get(name)
        if found is None:
            found = self.states[name] = ModelState(name, self._moved.set)
        return found

    def exists(self, name: str) -> bool:
        """False if the last load has found no model ``name``."""
        return name in self.states

    def phase(self, state: ModelState) -> str:
        """Return what a request for ``state`` waits for."""
        return "its load" if self.has_begun(state) else "room in the memory of models"

    def has_begun(self, state: ModelState) -> bool:
        """True if ``state`` has its room, and is being loaded."""
        return state.name in self.budget.charges and state.leaving is None

    # ------------------------------------------------------------------ load

    def begin(self, state: ModelState) -> None:
        """Start to load ``state``, unless that is done already. `ModelState.wake` is called at its end."""
        if state.loading is None and not self._has_stopped:
            state.loading = asyncio.create_task(self._load(state))
        elif self._has_stopped:
            raise Unavailable("Server exiting")

    async def _load(self, state: ModelState) -> None:
        wanted: dict[str, LoadableModel] = {}
        charged: list[str] = []
        try:
            wanted = await self._closure(state.name)
            if state.name not in wanted:
                self.states.pop(state.name, None)
                return
            charged = await self._make_room(state, wanted)
            log.info("loading '%s' on demand", state.name)
            await self.models.load(state.name)
            await asyncio.to_thread(release_memory)
            await self._settle(wanted, charged)
            state.failed = None
            self.loaded += 1
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, HeadraceError):
                log.exception("the load of '%s' failed", state.name)
                error = InternalError(f"{type(error).__name__}: {error}")
            self._fail(state, error)
        finally:
            for name in charged:
                if name not in self.open and self.state(name).leaving is None:
                    self.budget.charges.pop(name, None)
            state.loading = None
            self._moved.set()
            state.wake()

    def _fail(self, state: ModelState, error: HeadraceError) -> None:
        if isinstance(error, _NotWanted):
            return
        self.failures += 1
        state.failed = FailedLoad(error, monotonic() + self._options.pause)
        log.warning("'%s' could not be loaded; the next attempt is in %g s", state.name, self._options.pause)

    async def _closure(self, name: str) -> dict[str, LoadableModel]:
        """Return ``name`` and all models that it needs, by name; without those that the repository does not have."""
        found: dict[str, LoadableModel] = {}
        names = [name]
        for each in names:  # grows in the loop
            model = await self.models.find(each)
            if model is not None and each not in found:
                try:
                    self.state(each).describe(model, read_settings(model.config))
                except ConfigError as error:
                    raise LoadError(f"failed to load '{each}': {error.message}") from error
                found[each] = model
                names += model.needed
        return found

    async def _make_room(self, state: ModelState, wanted: Mapping[str, LoadableModel]) -> list[str]:
        """Charge the models of ``wanted`` that are not charged yet, when there is room for them. Return their names.

        Loads wait in line. The first one evicts models: idle ones at first; if these are not enough for a while, others
        take no new requests until they are idle. Another one gets its room at once if that takes nothing from those
        before it. Raises `LoadError` if the budget is too small, `_NotWanted` if nobody waits any more.
        """
        load = _WaitingLoad()
        self._line.append(load)
        try:
            while True:
                if not (state.waiting or state.in_flight):
                    raise _NotWanted(f"model '{state.name}' is not waited for any more")
                self._moved.clear()
                is_near = load in self._line[:_LOOKED_AT]
                if is_near:
                    needs = {name: (model, self.state(name)) for name, model in wanted.items()}
                    estimates = self._estimates.of(state.name, needs, self._pinned_charges(wanted))
                    load.needed = {name: need for name, need in estimates.items() if name not in self.budget.charges}
                    if self._is_clear(wanted) and self._has_room(load):
                        self.budget.charges |= load.needed
                        return list(load.needed)
                    if self._line[0] is load and self._is_clear(wanted):
                        load.first_s = load.first_s or monotonic()
                        self._evict_for(state, wanted, load)
                with suppress(TimeoutError, asyncio.TimeoutError):  # a sequence ends, or patience, without a word
                    await asyncio.wait_for(self._moved.wait(), 0.1 if is_near else 1)
        finally:
            self._line.remove(load)
            self._moved.set()

    def _has_room(self, load: _WaitingLoad) -> bool:
        """True if there is room for ``load`` now, and still for those before it when the leaving models have left."""
        if self.budget.excess(load.needed.values()):
            return False
        before = self._line[: self._line.index(load)]
        needed = [each for other in (*before, load) for each in other.needed.values()]
        return not before or not self.budget.excess(needed, self._leaving())

    def _leaving(self) -> list[str]:
        return [each.name for each in self.states.values() if each.leaving is not None]

    def _evict_for(self, state: ModelState, wanted: Mapping[str, LoadableModel], load: _WaitingLoad) -> None:
        """Evict idle models so that ``load`` fits. After a while, close busy ones, too."""
        is_patient = monotonic() - load.first_s < self._options.patience

        def may_go(each: ModelState) -> bool:
            return not self._is_pinned(each) and (each.is_idle or not (is_patient or each.has_sequences))

        victims = self.budget.victims(load.needed.values(), self.open, wanted, self._leaving(), may_go)
        for victim in victims or ():
            self.evict(victim, f"its {shown(self._charged(victim))} are needed for '{state.name}'")

    def _is_clear(self, wanted: Mapping[str, LoadableModel]) -> bool:
        """False if a model of ``wanted`` is being unloaded, or if the first model of its backend is being loaded: its
        memory is the better estimate for the next one."""
        if any(self.state(name).leaving is not None for name in wanted):
            return False
        unknown = self._estimates.unmeasured(wanted.values())
        loading = (self.state(name) for name in self.budget.charges if name not in self.open)
        return not unknown or not any(each.backend in unknown and each.loading is not None for each in loading)

    def _pinned_charges(self, wanted: Mapping[str, LoadableModel]) -> Mapping[str, Mapping[str, int]]:
        """Return the charges of the models that are never evicted, without those of ``wanted``: the pinned ones that
        are loaded, and what they need."""
        names = [name for name, state in self.open.items() if self._is_pinned(state)]
        for name in names:  # grows in the loop
            names += [each for each in self.state(name).needed if each in self.open and each not in names]
        return {name: self.budget.charges.get(name, {}) for name in names if name not in wanted}

    async def _settle(self, wanted: Mapping[str, LoadableModel], loaded: Sequence[str]) -> None:
        """Charge the models ``loaded`` what was measured.

        Raises `LoadError`, and unloads the model, if that alone is above the budget.
        """
        for name in loaded:
            executors = [executor for each in self.models.served(name) for executor in each.executors]
            self.state(name).in_server = any(each.runs_on != "process" for each in executors)
            await self._measure_processes(self.state(name))
        self._charge()
        top = self.state(next(iter(wanted)))
        alone = {top.name: self.budget.charges.get(top.name, {})}
        is_certain = not top.in_server or (len(self.open) == 1 and not self._is_moving)
        if is_certain and (why := self.budget.impossible(alone, self._pinned_charges(wanted))):
            self.evict(top, "it is above the budget")
            raise LoadError(f"model '{top.name}' was loaded and is unloaded again: {why}")
        for state in map(self.state, loaded):
            if state.process_bytes and not state.in_server:
                self._estimates.learn(state)
        self._enforce()

    async def _measure_processes(self, state: ModelState) -> None:
        sizes = [await asyncio.to_thread(process_bytes, each) for each in self.models.served(state.name)]
        state.process_bytes = sum(sizes)

    def _charge(self) -> None:
        """Charge each loaded model what it occupies now.

        The shares in the server are not measured while models are loaded or evicted there: these have no share yet.
        """
        inside = {state.name: state.file_bytes for state in self.open.values() if state.in_server}
        shares = {} if self._is_moving else self.server.shares(inside)
        for state in self.open.values():
            least = max(state.server_bytes, state.file_bytes) if state.in_server else 0
            state.server_bytes = shares.get(state.name, least)
            size = max(state.process_bytes + state.server_bytes, state.settings.memory)
            versions = self.models.served(state.name)
            for each in versions:
                each.memory_bytes = size // len(versions)
            before = self.budget.charges.get(state.name, {})
            state.measured = self.budget.charges[state.name] = {**before, HOST: size}

    @property
    def _is_moving(self) -> bool:
        """True if a model is being loaded into the server, or evicted from it."""
        charged = (self.state(name) for name in self.budget.charges if name not in self.open)
        return any(state.in_server for state in charged)

    # ------------------------------------------------------------------ unload

    def evict(self, state: ModelState, why: str) -> None:
        """Take no more requests for ``state``, and unload it when its requests are answered."""
        if state.leaving is None:
            self.open.pop(state.name, None)
            state.leaving = asyncio.create_task(self._evict(state, why))

    async def _evict(self, state: ModelState, why: str) -> None:
        held = self._charged(state)
        log.info("evicting '%s' (%s, idle for %.0f s): %s", state.name, shown(held), state.idle_for_s, why)
        try:
            for other in list(self.open.values()):  # those that need it are unloaded first
                if state.name in other.needed:
                    self.evict(other, f"it needs '{state.name}', which is evicted")
            for other in self.states.values():
                if state.name in other.needed and other.leaving is not None and other is not state:
                    await asyncio.shield(other.leaving)
            while state.in_flight:
                self._moved.clear()
                await self._moved.wait()
            await self.models.unload(state.name)
            await asyncio.to_thread(release_memory)
            self.evictions += 1
        except HeadraceError as error:
            log.error("'%s' could not be evicted: %s", state.name, error.message)
        finally:
            self.budget.charges.pop(state.name, None)
            state.leaving = None
            self.changed()
            self._moved.set()
            state.wake()

    def unload_idle(self) -> None:
        """Unload the models whose keep-alive is over."""
        needed = {name for state in self.open.values() for name in state.needed}
        for state in list(self.open.values()):
            keep_s = self._options.keep_alive if state.settings.keep_alive_s is None else state.settings.keep_alive_s
            may_go = state.is_idle and state.name not in needed and not self._is_pinned(state)
            if keep_s and may_go and state.idle_for_s >= keep_s:
                self.evict(state, f"its keep-alive of {keep_s:g} s is over")

    async def measure(self) -> None:
        """Measure the memory of all models again, and evict idle ones if it has grown above the budget."""
        for state in list(self.open.values()):
            if state.process_bytes:
                await self._measure_processes(state)
        self._charge()
        self._enforce()

    def _enforce(self) -> None:
        """If models have grown above the budget, evict idle ones."""
        if self.budget.excess():

            def may_go(each: ModelState) -> bool:
                return not self._is_pinned(each) and each.is_idle

            for victim in self.budget.victims((), self.open, (), self._leaving(), may_go, partly=True) or ():
                self.evict(victim, "the models have grown above the budget")

    def changed(self) -> None:
        """Take over which models serve now."""
        served = set(self.models.all_served())
        for name in [name for name in self.open if name not in served]:
            state = self.open.pop(name)
            if state.leaving is None and state.loading is None:
                self.budget.charges.pop(name, None)
            self._moved.set()
        for name in served - self.open.keys():
            state = self.state(name)
            if state.leaving is None:
                state.used_ns = monotonic_ns()  # it is not idle for longer than it is loaded
                self.open[name] = state

    def stop(self) -> None:
        """Begin no more loads."""
        self._has_stopped = True
        for state in self.states.values():
            if state.loading is not None and state.name not in self.budget.charges:
                state.loading.cancel()
            state.wake()

    def _is_pinned(self, state: ModelState) -> bool:
        return state.settings.pinned or state.name in self._pinned_names

    def _charged(self, state: ModelState) -> int:
        return self.budget.charges.get(state.name, {}).get(HOST, 0)


class _WaitingLoad:
    """A load that waits for room."""

    def __init__(self) -> None:
        #: By model that is not charged yet: what it will be charged, by device.
        self.needed: Mapping[str, Mapping[str, int]] = {}
        #: The monotonic time since which it is the first in line.
        self.first_s = 0.0


class _NotWanted(Unavailable):
    """All callers that waited for a load have left. It is no failure of the model."""
