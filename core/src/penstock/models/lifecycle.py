"""Loads, replaces and unloads models; the only writer of their states. Event loop only.

A version that replaces another is loaded beside it; the swap is one assignment in the
`Directory`, and the old version answers what it has (behaviours.md sections 5.3 and 5.5).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.errors import InternalError, OperatorError, PenstockError
from penstock.models.directory import Directory
from penstock.models.loading import Loader, Plan
from penstock.models.repository import Entry
from penstock.models.served import ServedModel
from penstock.models.states import UNLOADED, ModelRecord, State, VersionRecord

log = logging.getLogger(__name__)

T = TypeVar("T")


class Lifecycle:
    """``threads`` bounds how many versions load at once; ``retries`` is per version."""

    def __init__(self, loader: Loader, directory: Directory, threads: int = 4, retries: int = 0) -> None:
        self.records: dict[str, ModelRecord] = {}
        self._loader = loader
        self._directory = directory
        self._retries = retries
        self._threads = ThreadPoolExecutor(max(1, threads), thread_name_prefix="penstock-load")
        self._locks: dict[str, asyncio.Lock] = {}
        self._retiring: set[asyncio.Task[None]] = set()

    async def load_all(self, entries: Iterable[Entry]) -> list[PenstockError]:
        """Load every model, as many at once as there are threads; returns what failed."""
        results = await asyncio.gather(*(self._attempt(entry) for entry in entries))
        return [error for error in results if error is not None]

    async def load(self, entry: Entry) -> None:
        """Load the versions of ``entry`` that its policy selects, and serve them instead of the old.

        All or nothing: if one version fails, the old ones stay. Raises `OperatorError`.
        """
        async with self._locks.setdefault(entry.name, asyncio.Lock()):
            record = self.records.setdefault(entry.name, ModelRecord(entry.name))
            try:
                plan = await self._in_thread(self._loader.plan, entry)
            except PenstockError as error:
                # Triton's index shows the reason for a duplicate bare (behaviours.md section 1.6).
                record.problem = error.message if entry.is_duplicate else f"{error.code.value}: {error.message}"
                log.error("failed to load '%s': %s", entry.name, error.message)
                raise OperatorError(f"failed to load '{entry.name}': {error.message}") from error
            record.problem = ""
            await self._load_versions(record, plan)

    async def unload(self, name: str) -> None:
        """Stop serving ``name``; returns when its last request is answered and it is closed."""
        record = self.records.get(name)
        if record is None:
            return
        leaving = [version for version in record.versions.values() if version.served is not None]
        models = self._withdraw(leaving)
        await asyncio.gather(*(self._retire(model) for model in models))
        for version in leaving:
            version.state, version.reason = State.UNAVAILABLE, UNLOADED

    async def stop(self) -> None:
        """Unload everything, and wait for what is already on its way out."""
        await asyncio.gather(*(self.unload(name) for name in list(self.records)), *self._retiring)
        self._threads.shutdown(wait=False)

    def close(self) -> None:
        """Give up waiting: end every instance, answering what is still queued."""
        for record in self.records.values():
            for version in record.versions.values():
                if version.served is not None:
                    version.served.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def are_settled(self) -> bool:
        """Strict readiness (behaviours.md section 5.6)."""
        return all(
            not record.problem
            and record.versions
            and all(v.is_settled and (v.served is None or v.served.ready) for v in record.versions.values())
            for record in self.records.values()
        )

    async def _attempt(self, entry: Entry) -> PenstockError | None:
        try:
            await self.load(entry)
        except PenstockError as error:
            return error
        return None

    async def _load_versions(self, record: ModelRecord, plan: Plan) -> None:
        for number in plan.versions:
            current = record.versions.setdefault(number, VersionRecord())
            if current.served is None:
                current.state, current.reason = State.LOADING, ""
        results = await asyncio.gather(*(self._load_version(plan, number) for number in plan.versions))
        loaded = {
            n: result for n, result in zip(plan.versions, results, strict=True) if isinstance(result, ServedModel)
        }
        failed = {n: r for n, r in zip(plan.versions, results, strict=True) if not isinstance(r, ServedModel)}
        if failed:
            self._abandon(record, loaded, failed)
            clauses = "".join(
                f"version {n} is at UNAVAILABLE state: {error.code.value}: {error.message};\n"
                for n, error in failed.items()
            )
            raise OperatorError(f"load failed for model '{record.name}': {clauses}")
        self._swap(record, loaded)

    async def _load_version(self, plan: Plan, number: int) -> ServedModel | PenstockError:
        log.info("loading: %s:%d", plan.name, number)
        for attempt in range(self._retries + 1):
            try:
                model = await self._in_thread(self._loader.load, plan, number)
            except Exception as error:
                failure = error if isinstance(error, PenstockError) else _unexpected(error)
                log.error("failed to load '%s' version %d: %s", plan.name, number, failure.message)
                if attempt == self._retries:
                    return failure
            else:
                log.info("successfully loaded '%s'", plan.name)
                return model
        raise AssertionError("unreachable")

    def _swap(self, record: ModelRecord, loaded: dict[int, ServedModel]) -> None:
        """Serve ``loaded``, and let go of everything else of this model."""
        outgoing = [(n, v.served) for n, v in record.versions.items() if v.served is not None]
        for number, model in loaded.items():
            record.versions[number] = VersionRecord(State.READY, "", model)
        for number, _ in outgoing:
            if number not in loaded:
                record.versions[number] = VersionRecord(State.UNLOADING)
        self._directory.update(self.records)
        for number, model in outgoing:
            self._in_background(self._replace(record, number, model))

    async def _replace(self, record: ModelRecord, number: int, model: ServedModel) -> None:
        await self._retire(model)
        version = record.versions.get(number)
        if version is not None and version.state is State.UNLOADING:
            version.state, version.reason = State.UNAVAILABLE, UNLOADED

    def _abandon(self, record: ModelRecord, loaded: dict[int, ServedModel], failed: dict[int, PenstockError]) -> None:
        for number, error in failed.items():
            if record.versions[number].served is None:
                reason = f"{error.code.value}: {error.message}"
                record.versions[number] = VersionRecord(State.UNAVAILABLE, reason)
        for number, model in loaded.items():
            if record.versions[number].served is None:
                record.versions[number] = VersionRecord(State.UNAVAILABLE, UNLOADED)
            self._in_background(self._retire(model))

    def _withdraw(self, versions: list[VersionRecord]) -> list[ServedModel]:
        """Take ``versions`` out of service; returns their models, still to be retired."""
        models = [version.served for version in versions if version.served is not None]
        for version in versions:
            version.state, version.reason, version.served = State.UNLOADING, "", None
        self._directory.update(self.records)
        return models

    async def _retire(self, model: ServedModel) -> None:
        await model.drain()
        model.close()
        await asyncio.to_thread(model.join)
        await self._in_thread(self._loader.unloaded, model)
        log.info("successfully unloaded '%s' version %d", model.name, model.version)

    def _in_background(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _unexpected(error: Exception) -> PenstockError:
    log.error("unexpected error while loading", exc_info=error)
    failure = InternalError(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
