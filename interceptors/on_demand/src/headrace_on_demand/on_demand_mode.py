"""The control mode ``on-demand``: operations that wait for a load, and the state of a model for clients.

::

    OnDemand.admit -> _wait -> Loads.begin     one load for all callers that wait
    ModelState.ended                           no longer in flight: it may be evicted
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from time import monotonic
from typing import ClassVar

from headrace import (
    AnyOperation,
    Caller,
    ControlMode,
    ExtensionOperation,
    HeadraceError,
    LoadControl,
    Operation,
    Publisher,
    ServerOptions,
    Unavailable,
    Watch,
    rate_limited_logger,
    share_heap,
)
from headrace_on_demand.loads import Loads
from headrace_on_demand.metrics import OnDemandMetrics, memory_metrics
from headrace_on_demand.model_state import ModelState
from headrace_on_demand.on_demand_options import OnDemandOptions

log = rate_limited_logger(__name__)

#: The operations that load the model.
_USES = frozenset((Operation.INFER, Operation.GENERATE, Operation.MODEL_METADATA, Operation.MODEL_CONFIG))
#: An unknown name causes a new listing of the repository, at most once per second.
_LIST_S = 1.0
#: The interval at which memory is measured and idle models are unloaded.
_TICK_S = 1.0


class OnDemand(ControlMode):
    """Loads a model when an operation needs it, and evicts others to make room. Event loop only."""

    name: ClassVar[str] = "on-demand"

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._settings = options.group(OnDemandOptions)
        self.loads = Loads(self._settings)
        #: The models that accept requests, by name.
        self._open = self.loads.open
        self.models: LoadControl
        self._names: Collection[str] = ()
        self._listed_s = -_LIST_S
        self._listing: asyncio.Task[None] | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._waiting = self._refused = 0

    # ------------------------------------------------------------------ requests

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | Awaitable[Watch | None] | None:
        state = self._open.get(model)
        if state is not None:
            if operation in _USES or _is_inference(operation):
                state.in_flight += 1
                return state
            return None
        if not model or caller.transport in ("model", "program"):  # these callers hold the model already
            return None
        if operation in _USES or _is_inference(operation):
            return self._wait(model, caller.deadline_ns)
        if operation is Operation.MODEL_READY and model not in self._names:
            return self._list()
        return None

    async def hold(self, name: str) -> Callable[[], None]:
        state = self._open.get(name)
        if state is not None:
            state.in_flight += 1
        else:
            state = await self._wait(name)
        return _nothing if state is None else state.release

    async def _wait(self, name: str, deadline_ns: int = 0) -> ModelState | None:
        """Wait until the model ``name`` accepts requests. Return it with one more in flight; None if it does not exist.

        Raises `Unavailable`.
        """
        if name not in self._names:
            await self._list()
            if name not in self._names:
                return None
        if self._waiting >= self._settings.max_waiting:
            self._refused += 1
            raise Unavailable(
                f"model '{name}' is not loaded, and {self._waiting} requests wait for models, which is the limit "
                "(--on-demand-max-waiting)",
                retry_after_s=1,
            )
        ends_s = monotonic() + self._settings.wait
        if deadline_ns:
            ends_s = min(ends_s, deadline_ns / 1e9)
        state = self.loads.state(name)
        state.waiting += 1  # keeps it from being evicted before this operation starts
        self._waiting += 1
        try:
            while name not in self._open:
                if state.failed is not None and state.failed.until_s > monotonic():
                    raise state.failed.refusal(name)
                self.loads.begin(state)
                if not await _woken(state, ends_s - monotonic()):
                    if not deadline_ns or deadline_ns / 1e9 > ends_s:
                        raise self._wait_timeout(state)
                    phase = self.loads.phase(state)
                    raise Unavailable(
                        f"Request timeout expired while it waited for {phase} of model '{name}'", retry_after_s=1
                    )
                if not self.loads.exists(name):
                    return None
        except BaseException:
            self._refused += 1
            raise
        finally:
            self._waiting -= 1
            state.waiting -= 1
        state.in_flight += 1
        return state

    def _wait_timeout(self, state: ModelState) -> Unavailable:
        """Return the error for a caller whose wait for ``state`` has timed out."""
        return Unavailable(
            f"model '{state.name}' is not loaded yet: the request has waited {self._settings.wait:g} s for "
            f"{self.loads.phase(state)} (--on-demand-wait)",
            retry_after_s=1,
        )

    async def _list(self) -> None:
        """List the repository again, at most once per second, and not before the server has started."""
        if self._listing is None:
            if self._ticking is None or monotonic() - self._listed_s < _LIST_S:
                return
            self._listing = asyncio.create_task(self._read_names())
        await asyncio.shield(self._listing)

    async def _read_names(self) -> None:
        try:
            self._names = frozenset(await self.models.names())
        except HeadraceError as error:
            log.error("cannot list the repository: %s", error.message)
        finally:
            self._listed_s, self._listing = monotonic(), None

    # ------------------------------------------------------------------ the state of a model

    def is_ready(self, name: str) -> bool:
        state = self.loads.states.get(name)
        is_paused = state is not None and state.failed is not None and state.failed.until_s > monotonic()
        return name in self._names and not is_paused

    def why_not_served(self, name: str) -> str:
        state = self.loads.states.get(name)
        if state is not None and state.failed is not None:
            return state.failed.refusal(name).message
        return "loaded on demand"

    async def load(self, name: str) -> None:
        """Load ``name`` now, also after a failed load, or reload it if it has changed.

        The wait for room is limited as that of a request. The wait for the load is not.
        """
        state = self.loads.state(name)
        state.waiting += 1
        try:
            if name in self._open:
                await self.models.load(name)
                await self.loads.measure()
                return
            state.failed = None
            while name not in self._open:
                self.loads.begin(state)
                has_ended = await _woken(state, self._settings.wait)
                if not has_ended and not self.loads.has_begun(state):
                    raise self._wait_timeout(state)
                if state.failed is not None:
                    raise state.failed.error
                if not self.loads.exists(name):
                    await self.models.load(name)  # raises the error
        finally:
            state.waiting -= 1

    async def unload(self, name: str) -> None:
        state = self._open.get(name)
        if state is not None:
            self.loads.evict(state, "a client asks for it")

    # ------------------------------------------------------------------ life

    async def start(self) -> list[HeadraceError]:
        self.models = self.loads.models = LoadControl(self.parts)
        if self.loads.budget.limits:
            share_heap()  # otherwise each loading thread keeps its own heap of up to 64 MiB
        await asyncio.to_thread(self.loads.server.begin)
        self._names = frozenset(await self.models.names())
        self._listed_s = monotonic()
        self._ticking = asyncio.create_task(self._tick())
        failures = []
        for name in self._settings.pinned_names:
            try:
                await self.load(name)
            except HeadraceError as error:
                log.error("the pinned model '%s' could not be loaded: %s", name, error.message)
                failures.append(error)
        return failures

    def changed(self) -> None:
        self.loads.changed()

    def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        self.loads.stop()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self.loads.measure()
                self.loads.unload_idle()
            except Exception:
                log.exception("the memory of the models could not be measured")

    def publishers(self) -> Iterable[tuple[dict[str, str], Publisher]]:
        loads = self.loads
        values = (
            loads.budget.used("host"),
            loads.budget.limits.get("host", 0),
            self._waiting,
            loads.loaded,
            loads.failures,
            loads.evictions,
            self._refused,
        )
        return (({}, OnDemandMetrics(values)), *memory_metrics(self.models, self._open))


async def _woken(state: ModelState, timeout_s: float) -> bool:
    """Wait until ``state`` changes. Return False if it does not within ``timeout_s``."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[bool] = loop.create_future()
    timer = loop.call_later(max(0.0, timeout_s), _expire, waiter)
    state.waiters.add(waiter)
    try:
        return await waiter
    finally:
        timer.cancel()
        state.waiters.discard(waiter)


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


def _is_inference(operation: AnyOperation) -> bool:
    return isinstance(operation, ExtensionOperation) and operation.category == "inference"


def _nothing() -> None:
    """Release nothing."""
