"""Loads and evictions: one load per model, within the budget.

::

    begin -> _load -> _closure     the model and what it needs, as the repository has them now
                   -> _make_room   one load at a time: evicts idle models, or waits for them; then charges
                   -> models.load  several at once
                   -> _settle      charges what was measured
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic

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
from headrace_on_demand.model_state import FailedLoad, ModelState, shown
from headrace_on_demand.on_demand_options import OnDemandOptions, read_settings

log = rate_limited_logger(__name__)

#: What a process of a model has beside its files before one was measured: an interpreter and NumPy.
_PROCESS_BYTES = 48 << 20
#: An engine has the file, its parsed form and the weights at once while it loads: ONNX Runtime 3.3 times the file.
_LOADING = 3.5


class Loads:
    """Loads and evicts models. Event loop only. ``models`` is set before the first call."""

    models: LoadControl

    def __init__(self, options: OnDemandOptions) -> None:
        self._options = options
        self.budget = MemoryBudget(options.limits)
        #: The models that were asked for, by name.
        self.states: dict[str, ModelState] = {}
        #: Those that take requests now.
        self.open: dict[str, ModelState] = {}
        self.loaded = self.failures = self.evictions = 0
        self.server = ServerMemory()
        self._turn = asyncio.Lock()
        #: Set when a model has become idle, has left, or was loaded: a load that waits for room looks again.
        self._moved = asyncio.Event()
        #: By backend, the most that a model had beside its files.
        self._overhead: dict[str, int] = {}
        self._has_stopped = False
        self._missing: set[str] = set()

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
        return "its load" if state.name in self.budget.charges else "room in the memory of models"

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
                if name not in self.open and self.states[name].leaving is None:
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

        Models are evicted for it: idle ones at first. If these are not enough for a while, others take no new requests
        until they are idle. Raises `LoadError` if the budget is too small, `_NotWanted` if nobody waits any more.
        """
        estimates: dict[str, Mapping[str, int]] = {name: self._least(model) for name, model in wanted.items()}
        if why := self.budget.impossible(estimates):
            raise LoadError(f"model '{state.name}' cannot be loaded: {why}")
        guesses = {name: self._estimate(model) for name, model in wanted.items()}
        if not self.budget.impossible(guesses):  # a guess refuses no model
            estimates = guesses
        async with self._turn:
            began_s = monotonic()
            while True:
                if not (state.waiting or state.in_flight):
                    raise _NotWanted(f"model '{state.name}' is not waited for any more")
                self._moved.clear()
                missing = [name for name in wanted if name not in self.budget.charges]
                leaving = [name for name in wanted if self.states[name].leaving is not None]
                if not leaving and not self._is_unmeasured(wanted):
                    needed = {name: estimates[name] for name in missing}
                    if not self.budget.excess(needed.values()):
                        self.budget.charges |= needed
                        return missing
                    self._evict_for(state, wanted, list(needed.values()), monotonic() - began_s)
                with suppress(TimeoutError, asyncio.TimeoutError):  # a sequence ends, or patience, without a word
                    await asyncio.wait_for(self._moved.wait(), 0.1)

    def _evict_for(
        self,
        state: ModelState,
        wanted: Mapping[str, LoadableModel],
        needed: list[Mapping[str, int]],
        waited_s: float,
    ) -> None:
        """Evict idle models so that ``needed`` fits. After a while, close busy ones, too."""
        is_patient = waited_s < self._options.patience
        leaving = [each.name for each in self.states.values() if each.leaving is not None]
        victims = self.budget.victims(
            needed,
            self.open,
            wanted,
            leaving,
            lambda each: not self._is_pinned(each) and (each.is_idle or not is_patient),
        )
        for victim in victims or ():
            self.evict(victim, f"its {shown(self._charged(victim))} are needed for '{state.name}'")

    def _is_unmeasured(self, wanted: Mapping[str, LoadableModel]) -> bool:
        """True if a model of a backend of which none was measured yet is being loaded: its memory is the better
        estimate for the next one."""
        unknown = {_backend(model) for model in wanted.values() if _has_process(model)}
        return any(
            state.loading is not None
            and state.name in self.budget.charges
            and state.name not in self.open
            and state.backend in unknown
            and state.backend not in self._overhead
            for state in self.states.values()
        )

    def _estimate(self, model: LoadableModel) -> Mapping[str, int]:
        """Return what ``model`` is charged while it is loaded."""
        least = self._least(model)
        host = least[HOST]
        if not self.states[model.name].measured:
            beside = self._overhead.get(_backend(model), _PROCESS_BYTES if _has_process(model) else 0)
            host = max(host, model.file_bytes + beside)
        return {**least, HOST: max(host, int(_LOADING * model.file_bytes))}

    def _least(self, model: LoadableModel) -> dict[str, int]:
        """Return what ``model`` needs for certain: what was measured last, or its files, or what its config says."""
        state = self.states[model.name]
        host = max(state.settings.memory, state.measured.get(HOST, model.file_bytes))
        gpus = [f"gpu {gpu}" for gpu in _gpus(model, self.budget)]
        on_gpu = max(state.settings.gpu_memory, model.file_bytes)
        return {HOST: host, **dict.fromkeys(gpus, on_gpu)}

    async def _settle(self, wanted: Mapping[str, LoadableModel], loaded: Sequence[str]) -> None:
        """Charge the models ``loaded`` what was measured.

        Raises `LoadError`, and unloads the model, if that alone is above the budget.
        """
        for name in loaded:
            state, executors = self.states[name], [e for each in self.models.served(name) for e in each.executors]
            state.in_server = any(each.runs_on != "process" for each in executors)
            await self._measure_processes(state)
            if not state.in_server and executors:
                beside, known = state.process_bytes - state.file_bytes, self._overhead.get(state.backend, 0)
                self._overhead[state.backend] = max(known, beside)
        self._charge()
        top = next(iter(wanted))
        alone = {top: self.budget.charges.get(top, {})}
        is_certain = not self.states[top].in_server or (len(self.open) == 1 and not self._is_moving)
        if is_certain and (why := self.budget.impossible(alone)):
            self.evict(self.states[top], "it is above the budget")
            raise LoadError(f"model '{top}' was loaded and is unloaded again: {why}")
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
        charged = (self.states[name] for name in self.budget.charges if name not in self.open)
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
        for state in list(self.open.values()):
            keep_s = self._options.keep_alive if state.settings.keep_alive_s is None else state.settings.keep_alive_s
            is_needed = any(state.name in other.needed for other in self.open.values())
            if keep_s and not self._is_pinned(state) and not is_needed and state.is_idle and state.idle_for_s >= keep_s:
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
            leaving = [each.name for each in self.states.values() if each.leaving is not None]
            chosen = self.budget.victims(
                (), self.open, (), leaving, lambda each: not self._is_pinned(each) and each.is_idle
            )
            for victim in chosen or ():
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
                self.open[name] = state

    def stop(self) -> None:
        """Begin no more loads."""
        self._has_stopped = True
        for state in self.states.values():
            if state.loading is not None and state.name not in self.budget.charges:
                state.loading.cancel()
            state.wake()

    def _is_pinned(self, state: ModelState) -> bool:
        return state.settings.pinned or state.name in self._options.pinned_names

    def _charged(self, state: ModelState) -> int:
        return self.budget.charges.get(state.name, {}).get(HOST, 0)


class _NotWanted(Unavailable):
    """All callers that waited for a load have left. It is no failure of the model."""


def _backend(model: LoadableModel) -> str:
    return model.config.backend or model.config.platform


def _has_process(model: LoadableModel) -> bool:
    """True if the instances probably run in processes."""
    isolation = model.config.parameters["isolation"].string_value if "isolation" in model.config.parameters else ""
    return isolation == "process" or (not isolation and model.config.backend == "python")


def _gpus(model: LoadableModel, budget: MemoryBudget) -> list[int]:
    """Return the GPUs of the instances of ``model`` that have a budget."""
    limited = [int(device.partition(" ")[2]) for device in budget.limits if device != HOST]
    found: set[int] = set()
    for group in model.config.instance_group:
        if group.kind == group.KIND_GPU:
            found.update(group.gpus or limited)
    return [gpu for gpu in limited if gpu in found]
