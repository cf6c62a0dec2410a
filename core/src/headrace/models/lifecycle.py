"""Loads, replaces and unloads models. Only this module changes their states. Event loop only.

A new version is loaded beside the one that it replaces. One assignment in the `ServingTable` swaps them, and the old
version answers its remaining requests (docs/spec/behaviours.md sections 5.3 and 5.5).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from headrace.config.parameters import LOAD_TIMEOUT
from headrace.errors import ConfigError, HeadraceError, LoadError, OperatorError
from headrace.executors.threads import run_on_thread
from headrace.models.abandoned_loads import AbandonedLoads
from headrace.models.configuring import LOAD_TIMEOUT_OPTION, LOAD_TIMEOUT_S
from headrace.models.dependencies import Dependencies, Needed
from headrace.models.loader import Loader, LoadPlan
from headrace.models.running_loads import Background, LoadSlots, NestedLoads, Progress, Wait
from headrace.models.served import PreparedChange, ServedModel
from headrace.models.serving_table import ServingTable
from headrace.models.states import (
    UNLOADED,
    Draining,
    ModelRecord,
    State,
    VersionRecord,
    drain,
    poll_failure,
    reason,
    unexpected,
    versions_failure,
)
from headrace.models.versions import NoVersion
from headrace.storage.repositories import Entry
from headrace.telemetry.log_limits import logger_without_repeats
from headrace.telemetry.logs import VERBOSE_2

log = logger_without_repeats(__name__)

#: At most this long, in s, a load waits for removed instances to close.
LEAVING_S = 5.0


class Lifecycle:
    """Loads and unloads models, and keeps their records.

    ``slots`` limits how many versions load at once. ``nested`` records which loads wait for others. ``find`` returns a
    model that another one needs, and may block. ``retries`` is per version.
    """

    def __init__(
        self,
        loader: Loader,
        table: ServingTable,
        slots: LoadSlots,
        nested: NestedLoads,
        find: Callable[[str], Entry | None],
        retries: int = 0,
    ) -> None:
        self.records: dict[str, ModelRecord] = {}
        self.background = Background()
        #: True if only models that are served count for `are_settled`.
        self.is_on_demand = False
        self._dependencies = Dependencies(self.records, nested)
        self._find = find
        #: Models that were loaded by name, and not only as dependencies.
        self._by_name: set[str] = set()
        self._is_stopping = False
        #: Versions that take no new requests and still have some.
        self._draining: set[ServedModel] = set()
        self._drains: dict[asyncio.Future[None], list[str]] = {}
        self._loader = loader
        self._table = table
        self._retries = retries
        self._slots = slots
        self.abandoned_loads = AbandonedLoads()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def load_all(self, entries: Iterable[Entry]) -> list[HeadraceError]:
        """Load every model, as many at once as there are slots. Return the failures.

        Unlike `load`, this records the reason as the model's problem if no version of it could be loaded.
        """
        entries = list(entries)
        self._by_name.update(entry.name for entry in entries)
        with Progress(entry.name for entry in entries) as progress:
            attempts = {e.name: self.background.start(self._attempt(e, progress)) for e in entries}
            progress.attempts |= attempts
            results = await asyncio.gather(*map(asyncio.shield, attempts.values()))
        return [error for error in results if error is not None]

    async def load(self, entry: Entry) -> None:
        """Load the versions of ``entry`` that its policy selects, and serve them instead of the old ones.

        All or nothing: if one version fails, the old ones stay. A version with the same config and unchanged files is
        kept, unless one of its instances is dead. A cancelled caller does not stop the load. Raises `OperatorError`.
        """
        self._by_name.add(entry.name)
        await asyncio.shield(self.background.start(self._load_alone(entry)))

    async def unload(self, name: str, with_needed: bool = False) -> None:
        """Stop serving ``name``. Returns at once; in the background, the model answers its requests and is closed.

        ``with_needed``: also unload the models that only ``name`` needed and that were not loaded by name.

        A load that waits for processes fails at once. A load on a thread is abandoned after
        `abandoned_loads.GRACE_S`, even if it never ends. Loads of models that need ``name`` end first, as in Triton.
        """
        self._loader.stop_loading(name)
        self.abandoned_loads.end_soon(name, "was unloaded while it was being loaded")
        for dependent in self._dependencies.above(name):
            async with self._turn(dependent):
                pass
        async with self._turn(name):
            needed = self._dependencies.needed(name) if with_needed else ()
            self._dependencies.forget(name)
            self._by_name.discard(name)
            self._stop_serving(name)
        for other in needed:
            if not (other in self._by_name or self._dependencies.dependents(other)):
                await self.unload(other, with_needed)

    async def closed(self, name: str) -> None:
        """Return when no version of ``name`` is being unloaded."""
        while waiting := [drain_task for drain_task, names in self._drains.items() if name in names]:
            await asyncio.wait(waiting)

    async def remove(self, name: str) -> None:
        """`unload` ``name``, which was removed from the repository, and forget the reasons of its failed versions."""
        async with self._turn(name):
            self._dependencies.forget(name)
            self._stop_serving(name)
            record = self.records.get(name, ModelRecord(name))
            record.problem = ""
            for number in [number for number, version in record.versions.items() if version.has_failed]:
                del record.versions[number]
            if not record.versions:
                self.records.pop(name, None)

    def forget(self, names: Iterable[str]) -> None:
        """Remove the records of the models in ``names`` that are unloaded or failed to load."""
        for name in names:
            record = self.records.get(name)
            if record is not None and all(each.state is State.UNAVAILABLE for each in record.versions.values()):
                self._dependencies.forget(name)
                del self.records[name]

    def is_served(self, name: str) -> bool:
        """True if any version of ``name`` takes requests."""
        return name in self.records and self.records[name].is_served

    def has_died(self, name: str) -> bool:
        """True if a version of ``name`` is served and one of its instances is dead."""
        record = self.records.get(name)
        return record is not None and not record.is_alive

    @property
    def why_not_alive(self) -> str:
        """Return in one line the first model with a dead instance, and the reason; empty if all are alive."""
        for record in self.records.values():
            for number, version in record.versions.items():
                if version.served is not None and (why := version.served.why_not_alive):
                    return f"model '{record.name}' version {number} is not ready: {why}"
        return ""

    def stopping(self) -> None:
        """Note that the server has begun to stop. `stop` follows when no client can send requests any more."""
        self._is_stopping = True
        self._loader.deadline.stopping()

    async def stop(self, *, wait_for_loads: bool = True) -> None:
        """Unload everything, after running loads have ended. Return when the last request is answered.

        Without ``wait_for_loads``, running loads are abandoned.
        """
        if wait_for_loads:
            self.abandoned_loads.end_all_soon("was being loaded when the server stopped")
            await self.background.settle()
        self._is_stopping = True
        for name in self.records:
            self._stop_serving(name)
        while self._drains:
            await asyncio.wait(self._drains)
        if not wait_for_loads:
            self._loader.abandon()
            return
        await self.background.settle()
        self._slots.close()
        if self.abandoned_loads.has_any:
            self._loader.abandon()

    def close(self) -> None:
        """Stop waiting: log the late models, and end every model at once, including those being unloaded."""
        self._name_the_late()
        served = [v.served for record in self.records.values() for v in record.versions.values()]
        for model in {*filter(None, served), *self._draining}:
            try:
                model.abandon()
            except Exception:  # the others must still be ended
                log.exception("'%s' version %d failed to end", model.name, model.version)
        self._loader.abandon()
        self._slots.close()

    @property
    def are_settled(self) -> bool:
        """True if the server is ready under strict readiness (docs/spec/behaviours.md section 5.6)."""
        counted = (each for each in self.records.values() if (each.is_served if self.is_on_demand else each.counts))
        return all(record.is_settled and record.is_alive for record in counted)

    def _name_the_late(self) -> None:
        for name, record in self.records.items():
            for number, version in record.versions.items():
                if version.state in (State.LOADING, State.UNLOADING):
                    log.error("'%s' version %d is still %s", name, number, version.state.value)

    async def _attempt(self, entry: Entry, progress: Progress) -> HeadraceError | None:
        try:
            await self._load(entry, progress)
        except HeadraceError as error:
            progress.failed(entry.name)
            record = self.records.setdefault(entry.name, ModelRecord(entry.name))
            if not record.versions or (entry.is_duplicate and not record.is_served):
                # Triton's index has only the message for a duplicate (docs/spec/behaviours.md section 1.6).
                cause = error.__cause__ if isinstance(error.__cause__, HeadraceError) else error
                record.problem = cause.message if entry.is_duplicate else f"{cause.code.value}: {cause.message}"
                record.counts = isinstance(cause, NoVersion)
            return error
        return None

    async def _load_alone(self, entry: Entry) -> None:
        with Progress([entry.name]) as progress:
            await self._load(entry, progress)

    async def _load(self, entry: Entry, progress: Progress) -> None:
        async with self._turn(entry.name):
            plan = await self._plan(entry)
            if plan is None:
                return
            record = self.records.setdefault(entry.name, ModelRecord(entry.name))
            record.problem, record.counts = "", True
            known = record.versions
            changed = [n for n, made_of in plan.versions.items() if n not in known or not known[n].is_still(made_of)]
            async with self._closed(plan):
                with self._dependencies.noted(plan, entry, record):
                    await self._dependencies.await_loads(plan, partial(self._load_needed, progress=progress))
                    leaving = await self._load_versions(record, plan, progress, changed)
        progress.loaded(entry.name)
        if leaving:  # an idle instance has closed when the load ends; a busy one closes later
            await asyncio.wait([asyncio.wrap_future(left) for left in leaving], timeout=LEAVING_S)

    async def _load_needed(self, name: str, progress: Progress) -> None:
        """Load ``name``, which another model needs, unless it is served or being loaded."""
        attempt = progress.attempts.get(name)
        if attempt is None:
            if self.is_served(name):
                return
            entry = await self._slots.run(self._find, name)
            attempt = progress.attempts.get(name)
            if attempt is None:
                if entry is None:
                    return
                attempt = self.background.start(self._attempt(entry, progress))
                progress.join(name, attempt)
        await asyncio.shield(attempt)

    def _follow(self, name: str) -> None:
        """Reload the models that need ``name``, in the background, after its served versions have changed."""
        if not self._is_stopping:
            for dependent in self._dependencies.dependents(name):
                self.background.start(self._load_again(dependent))

    async def _load_again(self, name: str) -> None:
        """Load the versions of ``name`` again with the current versions of the models that it needs.

        If one of those is missing, unload ``name``.
        """
        async with self._turn(name):
            known, record = self._dependencies.known(name), self.records.get(name)
            if known is None or record is None:
                return
            plan, _ = known
            if not self._dependencies.is_stale(plan, filter(None, (v.served for v in record.versions.values()))):
                return
            with Progress([name]) as progress:
                try:
                    await self._load_planned_again(record, plan, progress)
                except HeadraceError as error:
                    log.error("'%s' is not served any more: %s", name, error.message)
                    self._stop_serving(name)
                else:
                    progress.loaded(name)

    async def _load_planned_again(self, record: ModelRecord, plan: LoadPlan, progress: Progress) -> None:
        plan = await self._slots.run(self._loader.reopen, plan, wait=self._files_wait(plan.name))
        async with self._closed(plan):
            await self._load_versions(record, plan, progress, list(plan.versions))

    async def _plan(self, entry: Entry) -> LoadPlan | None:
        """Return the load plan of ``entry``; None if nothing has changed since it was loaded."""
        record = self.records.get(entry.name)
        is_fine = record is not None and record.is_served and record.is_settled and record.is_alive
        loaded = record.fingerprint if record is not None and is_fine and entry.config is None else None
        try:
            self.abandoned_loads.refuse(entry.name)
            wait = self._files_wait(entry.name)
            return await self._slots.run(self._loader.plan, entry, loaded, wait=wait, is_reused=True)
        except NoVersion as error:
            log.error("failed to load '%s': %s", entry.name, error.message)
            raise OperatorError(f"load failed for model '{entry.name}': {error.message}\n") from error
        except (HeadraceError, OSError) as error:
            why = error.message if isinstance(error, HeadraceError) else error.strerror or ""
            log.error("failed to load '%s': %s%s", entry.name, _place(error), why)
            raise poll_failure(entry.name, why, is_override=entry.config is not None) from error

    @asynccontextmanager
    async def _closed(self, plan: LoadPlan) -> AsyncIterator[None]:
        """Close the files of ``plan`` at the end of its load."""
        is_loaded = False
        try:
            yield
            is_loaded = True
        finally:
            close = partial(plan.opened.close, is_loaded=is_loaded)
            if plan.opened.blocks:
                await run_on_thread(close, "headrace-load")
            else:
                close()

    def _files_wait(self, name: str) -> Wait[Any]:
        """Return the function that waits until the files of ``name`` are fetched and read."""
        return partial(self.abandoned_loads.wait, name, LOAD_TIMEOUT_S, "its files are read", self._end_late)

    async def _load_versions(
        self, record: ModelRecord, plan: LoadPlan, progress: Progress, numbers: Sequence[int]
    ) -> Sequence[Future[None]]:
        """Load the versions ``numbers``. Each returned future is done when a removed instance has closed."""
        log.log(VERBOSE_2, "AsyncLoad() '%s'", plan.name)
        for number in numbers:
            current = record.versions.setdefault(number, VersionRecord())
            if current.served is None:
                current.state, current.reason = State.LOADING, ""
        results = await asyncio.gather(
            *(self._load_version(plan, number, record.versions[number], progress) for number in numbers)
        )
        loaded: dict[int, ServedModel] = {}
        failed: dict[int, HeadraceError] = {}
        changes: dict[int, PreparedChange] = {}
        for number, result in zip(numbers, results, strict=True):
            if isinstance(result, ServedModel):
                loaded[number] = result
            elif isinstance(result, HeadraceError):
                failed[number] = result
            else:
                changes[number] = result
        log.log(VERBOSE_2, "OnLoadFinal() '%s' for all version(s)", plan.name)
        if failed:
            self._abandon(record, loaded, failed, plan.opened.entry)
            for change in changes.values():
                await self._slots.run(change.discard)
            first = next(iter(failed.values()))
            # the error concerns all versions, and Triton reports it once
            if plan.dependencies and not isinstance(first, LoadError):
                raise OperatorError(f"load failed for model '{plan.name}': {first.message}\n")
            raise versions_failure(plan.name, failed)
        leaving = [
            left for number, change in changes.items() for left in self._replace_instances(record, plan, number, change)
        ]
        self._swap(record, plan, loaded)
        record.fingerprint = plan.fingerprint
        return leaving

    def _replace_instances(
        self, record: ModelRecord, plan: LoadPlan, number: int, change: PreparedChange
    ) -> Sequence[Future[None]]:
        current = record.versions[number]
        assert current.served is not None
        leaving = current.served.replace_instances(change)
        current.fingerprint = plan.versions[number]
        log.info(
            "instances of '%s' version %d: %d serve, %d leave",
            plan.name,
            number,
            len(current.served.executors),
            len(leaving),
        )
        return leaving

    async def _load_version(
        self, plan: LoadPlan, number: int, current: VersionRecord, progress: Progress
    ) -> ServedModel | PreparedChange | HeadraceError:
        """Return version ``number``, or only the change of its instances, or the error."""
        log.info("loading: %s:%d", plan.name, number)
        log.log(VERBOSE_2, "CreateModel() '%s' version %d", plan.name, number)
        for attempt in range(self._retries + 1):
            try:
                self.abandoned_loads.refuse(plan.name)
                setting = f"parameter '{LOAD_TIMEOUT}', or {LOAD_TIMEOUT_OPTION} of --backend-config"
                wait: Wait[Any] = partial(self.abandoned_loads.wait, plan.name, plan.timeout_s, setting, self._end_late)
                if current.served is not None and current.wants_instances(plan.versions[number]):
                    served, change = current.served, self._change_on_thread
                    prepared: PreparedChange = await self._slots.run(change, plan, served, progress, wait=wait)
                    return prepared
                with self._dependencies.keeping(plan) as needed:
                    load = self._load_on_thread
                    model: ServedModel = await self._slots.run(load, plan, number, needed, progress, wait=wait)
            except Exception as error:
                failure = error if isinstance(error, HeadraceError) else unexpected(error)
                text = "failed to load '%s' version %d: %s: %s%s"
                log.error(text, plan.name, number, failure.code.value, _place(failure), failure.message)
                if attempt == self._retries or self.abandoned_loads.has(plan.name):
                    return failure
            else:
                log.log(VERBOSE_2, "OnLoadComplete() '%s' version %d", plan.name, number)
                return model
        raise AssertionError("unreachable")

    def _end_late(self, made: LoadPlan | ServedModel | PreparedChange | None) -> None:
        """Close the result of a load that was abandoned."""
        if isinstance(made, ServedModel):
            made.others = ()  # released when the load was abandoned
            self._begin_draining([Draining(VersionRecord(), made)])
        elif isinstance(made, LoadPlan):
            self.background.start(run_on_thread(partial(made.opened.close, is_loaded=False), "headrace-close"))
        elif made is not None:
            self.background.start(run_on_thread(made.discard, "headrace-close"))

    def _load_on_thread(self, plan: LoadPlan, number: int, needed: Needed, progress: Progress) -> ServedModel:
        progress.began(plan.name)
        return self._loader.load(plan, number, plan.opened.fetch(number), needed)

    def _change_on_thread(self, plan: LoadPlan, served: ServedModel, progress: Progress) -> PreparedChange:
        progress.began(plan.name)
        return self._loader.change(plan, served)

    def _swap(self, record: ModelRecord, plan: LoadPlan, loaded: dict[int, ServedModel]) -> None:
        """Serve ``loaded`` and the unchanged versions of ``plan``. Take all other versions of the model out of
        service."""
        outgoing = [
            (number, Draining(VersionRecord(State.UNLOADING), version.served))
            for number, version in record.versions.items()
            if version.served is not None and (number in loaded or number not in plan.versions)
        ]
        stale = [n for n, version in record.versions.items() if n not in loaded and version.has_failed]
        for number in stale:
            del record.versions[number]
        record.versions |= {number: draining.record for number, draining in outgoing}
        record.versions |= {n: VersionRecord(State.READY, "", model, plan.versions[n]) for n, model in loaded.items()}
        self._table.update(self.records, record.name)
        self._begin_draining([draining for _, draining in outgoing])
        self._follow(record.name)

    def _abandon(
        self, record: ModelRecord, loaded: dict[int, ServedModel], failed: dict[int, HeadraceError], entry: Entry
    ) -> None:
        for number, error in failed.items():
            if record.versions[number].served is None:
                record.versions[number] = VersionRecord(State.UNAVAILABLE, reason(error))
        for number in loaded:
            if record.versions[number].served is None:
                record.versions[number] = VersionRecord(State.UNAVAILABLE, UNLOADED)
        self._begin_draining([Draining(VersionRecord(), model) for model in loaded.values()])
        if entry.is_temporary and not record.is_served:  # the repository does not have it
            del self.records[record.name]

    def _stop_serving(self, name: str) -> None:
        """Take all versions of ``name`` out of service, and end them in the background."""
        record = self.records.get(name)
        if record is None or not record.is_served:
            return
        log.log(VERBOSE_2, "AsyncUnload() '%s'", name)
        draining = [Draining(v, v.served) for v in record.versions.values() if v.served is not None]
        for version, _ in draining:
            version.state, version.reason, version.served = State.UNLOADING, "", None
        self._table.update(self.records, name)
        self._begin_draining(draining)
        record.fingerprint = None
        self._follow(name)

    def _begin_draining(self, draining: Sequence[Draining]) -> None:
        drain_task = self.background.start(self._drain(draining))
        self._drains[drain_task] = [model.name for _, model in draining]
        drain_task.add_done_callback(self._drains.pop)

    async def _drain(self, draining: Sequence[Draining]) -> None:
        models = {each.model for each in draining}
        self._draining |= models
        try:
            await drain(draining, self._loader.unloaded)
        finally:
            self._draining -= models

    def _turn(self, name: str) -> asyncio.Lock:
        """Return the lock of ``name``: one load or unload at a time."""
        return self._locks.setdefault(name, asyncio.Lock())


def _place(error: Exception) -> str:
    """Return the line of the config file that ``error`` is about, for the log. Clients do not get paths."""
    return error.place if isinstance(error, ConfigError) else ""
