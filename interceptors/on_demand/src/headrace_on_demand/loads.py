"""Loads and evictions: one load per model, within the budget.

::

    begin -> _load -> _closure     reads the model and its dependencies from the repository
                   -> _make_room   queues; the first load evicts idle models, or waits for them; then charges
                   -> models.load  several at once
                   -> _settle      charges the measured memory
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
from headrace_on_demand.model_state import FailedLoad, ModelState, format_size
from headrace_on_demand.on_demand_options import OnDemandOptions, read_settings

log = rate_limited_logger(__name__)

#: The number of loads at the head of the queue that may get room.
_HEAD = 8


class Loads:
    """Loads and evicts models. Event loop only. ``models`` is set before the first call."""

    models: LoadControl

    def __init__(self, options: OnDemandOptions) -> None:
        self._options, self._pinned_names = options, frozenset(options.pinned_names)
        self.budget = MemoryBudget(options.limits)
        #: The requested models, by name.
        self.states: dict[str, ModelState] = {}
        #: The models that accept requests now.
        self.open: dict[str, ModelState] = {}
        self.loaded = self.failures = self.evictions = 0
        self.server = ServerMemory()
        #: The loads that wait for room, oldest first.
        self._queue: list[_WaitingLoad] = []
        #: Set when a model becomes idle, is unloaded or is loaded: waiting loads check for room again.
        self._changed = asyncio.Event()
        self._estimates = MemoryEstimates(self.budget)
        self._has_stopped = False

    def state(self, name: str) -> ModelState:
        """Return the state of ``name``, which may be new."""
        found = self.states.get(name)
        if found is None:
            found = self.states[name] = ModelState(name, self._changed.set)
        return found

    def exists(self, name: str) -> bool:
        """False if the last load found no model ``name``."""
        return name in self.states

    def phase(self, state: ModelState) -> str:
        """Return in words what a request for ``state`` waits for."""
        return "its load" if self.has_begun(state) else "room in the memory of models"

    def has_begun(self, state: ModelState) -> bool:
        """True if ``state`` has its room and is being loaded."""
        return state.name in self.budget.charges and state.eviction is None

    # ------------------------------------------------------------------ load

    def begin(self, state: ModelState) -> None:
        """Start to load ``state``, if no load is in progress. `ModelState.wake` is called at its end."""
        if state.loading is None and not self._has_stopped:
            state.loading = asyncio.create_task(self._load(state))
        elif self._has_stopped:
            raise Unavailable("Server exiting")

    async def _load(self, state: ModelState) -> None:
        closure: dict[str, LoadableModel] = {}
        charged: list[str] = []
        try:
            closure = await self._closure(state.name)
            if state.name not in closure:
                self.states.pop(state.name, None)
                return
            charged = await self._make_room(state, closure)
            log.info("loading '%s' on demand", state.name)
            await self.models.load(state.name)
            await asyncio.to_thread(release_memory)
            await self._settle(closure, charged)
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
                if name not in self.open and self.state(name).eviction is None:
                    self.budget.charges.pop(name, None)
            state.loading = None
            self._changed.set()
            state.wake()

    def _fail(self, state: ModelState, error: HeadraceError) -> None:
        if isinstance(error, _NotWanted):
            return
        self.failures += 1
        state.failed = FailedLoad(error, monotonic() + self._options.pause)
        log.warning("'%s' could not be loaded; the next attempt is in %g s", state.name, self._options.pause)

    async def _closure(self, name: str) -> dict[str, LoadableModel]:
        """Return ``name`` and all its dependencies, by name. Models that do not exist are left out."""
        found: dict[str, LoadableModel] = {}
        names = [name]
        for each in names:  # grows in the loop
            model = await self.models.find(each)
            if model is not None and each not in found:
                try:
                    self.state(each).read_config(model, read_settings(model.config))
                except ConfigError as error:
                    raise LoadError(f"failed to load '{each}': {error.message}") from error
                found[each] = model
                names += model.needed
        return found

    async def _make_room(self, state: ModelState, closure: Mapping[str, LoadableModel]) -> list[str]:
        """Wait for room, then charge the models of ``closure`` that are not charged yet. Return their names.

        Loads wait in a queue. The first one evicts idle models. If these are not enough after --on-demand-patience,
        busy ones get no new requests until they are idle. A later load gets its room at once if that does not delay
        those before it. Raises `LoadError` if the budget is too small, `_NotWanted` if no caller waits any more.
        """
        load = _WaitingLoad()
        self._queue.append(load)
        try:
            while True:
                if not (state.waiting or state.in_flight):
                    raise _NotWanted(f"model '{state.name}' is not waited for any more")
                self._changed.clear()
                is_near = load in self._queue[:_HEAD]
                if is_near:
                    needs = {name: (model, self.state(name)) for name, model in closure.items()}
                    estimates = self._estimates.of(state.name, needs, self._pinned_charges(closure))
                    load.needed = {name: need for name, need in estimates.items() if name not in self.budget.charges}
                    if self._is_clear(closure) and self._has_room(load):
                        self.budget.charges |= load.needed
                        return list(load.needed)
                    if self._queue[0] is load and self._is_clear(closure):
                        load.first_s = load.first_s or monotonic()
                        self._evict_for(state, closure, load)
                with suppress(
                    TimeoutError, asyncio.TimeoutError
                ):  # the end of a sequence or of the patience sets no event
                    await asyncio.wait_for(self._changed.wait(), 0.1 if is_near else 1)
        finally:
            self._queue.remove(load)
            self._changed.set()

    def _has_room(self, load: _WaitingLoad) -> bool:
        """True if ``load`` fits now, and those before it still fit after the evictions in progress."""
        if self.budget.excess(load.needed.values()):
            return False
        before = self._queue[: self._queue.index(load)]
        needed = [each for other in (*before, load) for each in other.needed.values()]
        return not before or not self.budget.excess(needed, self._in_eviction())

    def _in_eviction(self) -> list[str]:
        return [each.name for each in self.states.values() if each.eviction is not None]

    def _evict_for(self, state: ModelState, closure: Mapping[str, LoadableModel], load: _WaitingLoad) -> None:
        """Evict idle models so that ``load`` fits. After --on-demand-patience, evict busy ones, too."""
        is_patient = monotonic() - load.first_s < self._options.patience

        def is_evictable(each: ModelState) -> bool:
            return not self._is_pinned(each) and (each.is_idle or not (is_patient or each.has_sequences))

        victims = self.budget.victims(load.needed.values(), self.open, closure, self._in_eviction(), is_evictable)
        for victim in victims or ():
            self.evict(victim, f"its {format_size(self._charged(victim))} are needed for '{state.name}'")

    def _is_clear(self, closure: Mapping[str, LoadableModel]) -> bool:
        """False if a model of ``closure`` is being unloaded, or if the first model of its backend is being loaded.

        The memory of that first model gives a better estimate for the next one.
        """
        if any(self.state(name).eviction is not None for name in closure):
            return False
        unknown = self._estimates.unmeasured(closure.values())
        loading = (self.state(name) for name in self.budget.charges if name not in self.open)
        return not unknown or not any(each.backend in unknown and each.loading is not None for each in loading)

    def _pinned_charges(self, closure: Mapping[str, LoadableModel]) -> Mapping[str, Mapping[str, int]]:
        """Return the charges of the loaded pinned models and their dependencies, without those of ``closure``."""
        names = [name for name, state in self.open.items() if self._is_pinned(state)]
        for name in names:  # grows in the loop
            names += [each for each in self.state(name).needed if each in self.open and each not in names]
        return {name: self.budget.charges.get(name, {}) for name in names if name not in closure}

    async def _settle(self, closure: Mapping[str, LoadableModel], loaded: Sequence[str]) -> None:
        """Charge the measured memory of the models ``loaded``.

        Raises `LoadError`, and unloads the model, if it alone is above the budget.
        """
        for name in loaded:
            executors = [executor for each in self.models.served(name) for executor in each.executors]
            self.state(name).in_server = any(each.runs_on != "process" for each in executors)
            await self._measure_processes(self.state(name))
        self._charge()
        top = self.state(next(iter(closure)))
        alone = {top.name: self.budget.charges.get(top.name, {})}
        is_certain = not top.in_server or (len(self.open) == 1 and not self._is_changing)
        if is_certain and (why := self.budget.why_impossible(alone, self._pinned_charges(closure))):
            self.evict(top, "it is above the budget")
            raise LoadError(f"model '{top.name}' was loaded and is unloaded again: {why}")
        for state in map(self.state, loaded):
            if state.process_bytes and not state.in_server:
                self._estimates.record(state)
        self._enforce()

    async def _measure_processes(self, state: ModelState) -> None:
        sizes = [await asyncio.to_thread(process_bytes, each) for each in self.models.served(state.name)]
        state.process_bytes = sum(sizes)

    def _charge(self) -> None:
        """Charge each loaded model its current memory.

        Shares in the server's process are not measured during a load or an eviction there.
        """
        inside = {state.name: state.file_bytes for state in self.open.values() if state.in_server}
        shares = {} if self._is_changing else self.server.shares(inside)
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
    def _is_changing(self) -> bool:
        """True if a model is being loaded into the server, or evicted from it."""
        charged = (self.state(name) for name in self.budget.charges if name not in self.open)
        return any(state.in_server for state in charged)

    # ------------------------------------------------------------------ unload

    def evict(self, state: ModelState, why: str) -> None:
        """Accept no more requests for ``state``, and unload it when its requests are answered."""
        if state.eviction is None:
            self.open.pop(state.name, None)
            state.eviction = asyncio.create_task(self._evict(state, why))

    async def _evict(self, state: ModelState, why: str) -> None:
        size = self._charged(state)
        log.info("evicting '%s' (%s, idle for %.0f s): %s", state.name, format_size(size), state.idle_for_s, why)
        try:
            for other in list(self.open.values()):  # dependents are unloaded first
                if state.name in other.needed:
                    self.evict(other, f"it needs '{state.name}', which is evicted")
            for other in self.states.values():
                if state.name in other.needed and other.eviction is not None and other is not state:
                    await asyncio.shield(other.eviction)
            while state.in_flight:
                self._changed.clear()
                await self._changed.wait()
            await self.models.unload(state.name)
            await asyncio.to_thread(release_memory)
            self.evictions += 1
        except HeadraceError as error:
            log.error("'%s' could not be evicted: %s", state.name, error.message)
        finally:
            self.budget.charges.pop(state.name, None)
            state.eviction = None
            self.changed()
            self._changed.set()
            state.wake()

    def unload_idle(self) -> None:
        """Unload the models whose keep-alive time has passed."""
        needed = {name for state in self.open.values() for name in state.needed}
        for state in list(self.open.values()):
            keep_s = self._options.keep_alive if state.settings.keep_alive_s is None else state.settings.keep_alive_s
            is_evictable = state.is_idle and state.name not in needed and not self._is_pinned(state)
            if keep_s and is_evictable and state.idle_for_s >= keep_s:
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

            def is_evictable(each: ModelState) -> bool:
                return not self._is_pinned(each) and each.is_idle

            for victim in self.budget.victims((), self.open, (), self._in_eviction(), is_evictable, partly=True) or ():
                self.evict(victim, "the models have grown above the budget")

    def changed(self) -> None:
        """Update the set of models that accept requests."""
        served = set(self.models.all_served())
        for name in [name for name in self.open if name not in served]:
            state = self.open.pop(name)
            if state.eviction is None and state.loading is None:
                self.budget.charges.pop(name, None)
            self._changed.set()
        for name in served - self.open.keys():
            state = self.state(name)
            if state.eviction is None:
                state.used_ns = monotonic_ns()  # its idle time starts now
                self.open[name] = state

    def stop(self) -> None:
        """Cancel loads that wait, and start no more."""
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
        #: The charges by device of the models that are not charged yet, by name.
        self.needed: Mapping[str, Mapping[str, int]] = {}
        #: The monotonic time at which it became the first in the queue.
        self.first_s = 0.0


class _NotWanted(Unavailable):
    """All callers that waited for a load have disconnected. The model has not failed."""
