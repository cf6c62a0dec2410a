"""Models that need others to answer: loaded after these, loaded again when these are, and not served without them.

A version that is asked by others is kept until they have answered their last request, so that neither a load nor an
unload of what they need is seen by a caller. Source: docs/spec/behaviours.md sections 5.3, 5.5 and 5.10.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from headrace.errors import ConfigError, HeadraceError, InvalidArgument
from headrace.models.loader import LoadPlan
from headrace.models.running_loads import NestedLoads
from headrace.models.served import ServedModel
from headrace.models.states import ModelRecord
from headrace.schedulers.base import Dependency
from headrace.storage.repositories import Entry

#: What a version asks, by what its config says.
Needed: TypeAlias = "Mapping[Dependency, ServedModel]"


class Dependencies:
    """Which of ``records`` need which. ``nested`` knows which loads wait for which. Event loop only."""

    def __init__(self, records: Mapping[str, ModelRecord], nested: NestedLoads) -> None:
        self._records = records
        self._nested = nested
        #: Of every model that needs others and is served, or would be if these were: what it was to be loaded from.
        self._known: dict[str, tuple[LoadPlan, Entry]] = {}
        #: What each of these was last tried with; None if something was missing.
        self._tried: dict[str, frozenset[ServedModel] | None] = {}

    @contextmanager
    def noted(self, plan: LoadPlan, entry: Entry, record: ModelRecord) -> Iterator[None]:
        """``plan`` is being loaded: what it needs counts from now on, unless that raises and what was served before is
        still there."""
        before = self._known.pop(plan.name, None)
        if plan.dependencies:
            self._known[plan.name] = plan, entry
        try:
            yield
        except BaseException:
            if record.is_served or entry.is_temporary:
                self._known.pop(plan.name, None)
                if before is not None and record.is_served:
                    self._known[plan.name] = before
            raise

    def forget(self, name: str) -> None:
        """``name`` is served no more, whatever becomes of what it needs."""
        self._known.pop(name, None)
        self._tried.pop(name, None)

    def known(self, name: str) -> tuple[LoadPlan, Entry] | None:
        """What ``name`` is served from, or would be if what it needs were."""
        return self._known.get(name)

    def needed(self, name: str) -> list[str]:
        """The models that ``name`` needs itself."""
        known = self._known.get(name)
        return sorted({dependency.model for dependency in known[0].dependencies}) if known is not None else []

    def dependents(self, name: str) -> list[str]:
        """The models that need ``name`` themselves."""
        return [known for known, (plan, _) in self._known.items() if any(d.model == name for d in plan.dependencies)]

    def above(self, name: str) -> list[str]:
        """The models that need ``name``, themselves or through others, except those whose load waits for a model that
        asks for a change of ``name`` while it is being loaded itself."""
        found = self.dependents(name)
        askers = [asker for asker in self._nested.askers(name) if asker not in found]
        for dependent in found:  # which grows
            found += [each for each in self.dependents(dependent) if each not in found]
        return [each for each in found if not any(self._nested.path(each, asker) for asker in askers)]

    async def await_loads(self, plan: LoadPlan, load: Callable[[str], Awaitable[None]]) -> None:
        """Have ``load`` load what ``plan`` needs and is not served. What waits for the load of ``plan`` itself is not
        waited for: it will be missed."""
        names = sorted({dependency.model for dependency in plan.dependencies})
        await asyncio.gather(*(self._await_load(plan.name, name, load) for name in names))

    async def _await_load(self, asker: str, name: str, load: Callable[[str], Awaitable[None]]) -> None:
        if not self._nested.path(name, asker):
            with self._nested.waiting(asker, name):
                await load(name)

    def is_stale(self, plan: LoadPlan, served: Iterable[ServedModel]) -> bool:
        """Whether what ``plan`` needs is not what it was last tried with, or what those that are ``served`` ask."""
        try:
            found: frozenset[ServedModel] | None = frozenset(self._find(plan).values())
        except HeadraceError:
            found = None
        return found != self._tried.get(plan.name) or any(frozenset(model.others) != found for model in served)

    @contextmanager
    def kept(self, plan: LoadPlan) -> Iterator[Needed]:
        """What ``plan`` needs, kept for the version that is loaded with it, or until this raises.

        Raises `ConfigError` or `InvalidArgument` if something is missing, or needs ``plan`` in turn.
        """
        self._tried[plan.name] = None
        needed = self._find(plan)
        self._tried[plan.name] = frozenset(needed.values())
        for model in needed.values():
            model.keep()
        try:
            yield needed
        except BaseException:
            for model in needed.values():
                model.let_go()
            raise

    def _find(self, plan: LoadPlan) -> Needed:
        if not plan.dependencies:
            return {}
        if circle := self._circle(plan):
            more = f" ({' -> '.join(circle)})" if len(circle) > 3 else ""
            raise ConfigError(
                f"circular dependency between ensembles: {plan.name} -> ... -> {circle[-2]} -> {plan.name}{more}"
            )
        unknown = sorted({d.model for d in plan.dependencies if d.model not in self._records})
        if unknown:
            raise InvalidArgument(
                f"ensemble {plan.name} contains models that are not available or ambiguous: {', '.join(unknown)}"
            )
        return {dependency: self._served(plan.name, dependency) for dependency in plan.dependencies}

    def _served(self, asker: str, needed: Dependency) -> ServedModel:
        record = self._records[needed.model]
        served = {number: v.served for number, v in record.versions.items() if v.served is not None}
        says = f"ensemble '{asker}' depends on '{needed.model}'"
        if not served:
            failed = (f"version {n} is at UNAVAILABLE state: {v.reason};" for n, v in record.versions.items())
            why = record.problem or " ".join(failed)
            raise InvalidArgument(
                f"{says} which has no loaded version. Model '{needed.model}' loading failed with error: {why}"
            )
        found = served.get(max(served) if needed.version < 0 else needed.version)
        if found is None:
            raise InvalidArgument(f"{says} whose required version {needed.version} is not loaded.")
        return found

    def _circle(self, plan: LoadPlan) -> list[str]:
        """The models from ``plan`` on of which each needs the next, down to ``plan`` again; empty if there is none."""
        ways, seen = [[plan.name]], set[str]()
        while ways:
            way = ways.pop()
            last = plan if len(way) == 1 else self._known[way[-1]][0]
            for name in sorted({dependency.model for dependency in last.dependencies}):
                if name == plan.name:
                    return [*way, name]
                if name in self._known and name not in seen:
                    seen.add(name)
                    ways.append([*way, name])
        return []
