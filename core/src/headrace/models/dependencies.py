"""Models that need other models to answer.

They are loaded after these, loaded again with these, and not served without them. A version is kept until the versions
that call it have answered their last request. So callers notice neither a load nor an unload of a needed model. Source:
docs/spec/behaviours.md sections 5.3, 5.5 and 5.10.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from headrace.errors import ConfigError, HeadraceError, InvalidArgument
from headrace.models.configuring import kind_of
from headrace.models.loader import LoadPlan
from headrace.models.running_loads import NestedLoads
from headrace.models.served import ServedModel
from headrace.models.states import ModelRecord
from headrace.schedulers.base import Dependency
from headrace.storage.repositories import Entry

#: The versions that a version calls, by the dependencies of its config.
Needed: TypeAlias = "Mapping[Dependency, ServedModel]"


class Dependencies:
    """Finds the models of ``records`` that need others. ``nested``: loads that wait for others. Event loop only."""

    def __init__(self, records: Mapping[str, ModelRecord], nested: NestedLoads) -> None:
        self._records = records
        self._nested = nested
        #: The load plan of each model that needs others, if it is served or waits for them only.
        self._known: dict[str, tuple[LoadPlan, Entry]] = {}
        #: The versions that each of these was last tried with; None if something was missing.
        self._tried: dict[str, frozenset[ServedModel] | None] = {}

    @contextmanager
    def noted(self, plan: LoadPlan, entry: Entry, record: ModelRecord) -> Iterator[None]:
        """Use the dependencies of ``plan``, which is being loaded, from now on.

        If the load raises and the model is still served as before, restore the dependencies from before.
        """
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
        """Remove ``name``: it is no longer served, even if the models that it needs change."""
        self._known.pop(name, None)
        self._tried.pop(name, None)

    def known(self, name: str) -> tuple[LoadPlan, Entry] | None:
        """Return the plan from which ``name`` is served, or waits for the models that it needs."""
        return self._known.get(name)

    def needed(self, name: str) -> list[str]:
        """Return the models that ``name`` needs directly."""
        known = self._known.get(name)
        return sorted({dependency.model for dependency in known[0].dependencies}) if known is not None else []

    def dependents(self, name: str) -> list[str]:
        """Return the models that need ``name`` directly."""
        return [known for known, (plan, _) in self._known.items() if any(d.model == name for d in plan.dependencies)]

    def above(self, name: str) -> list[str]:
        """Return the models that need ``name``, directly or through others.

        Exception: not those whose load waits for a model that, while it is loaded itself, asks for a change of
        ``name``.
        """
        dependents = self.dependents(name)
        askers = [asker for asker in self._nested.askers(name) if asker not in dependents]
        for dependent in dependents:  # grows in the loop
            dependents += [each for each in self.dependents(dependent) if each not in dependents]
        return [each for each in dependents if not any(self._nested.path(each, asker) for asker in askers)]

    async def await_loads(self, plan: LoadPlan, load: Callable[[str], Awaitable[None]]) -> None:
        """Load by ``load`` the models that ``plan`` needs and that are not served.

        Models that wait for the load of ``plan`` itself are skipped; they will be missing.
        """
        names = sorted({dependency.model for dependency in plan.dependencies})
        await asyncio.gather(*(self._await_load(plan.name, name, load) for name in names))

    async def _await_load(self, asker: str, name: str, load: Callable[[str], Awaitable[None]]) -> None:
        if not self._nested.path(name, asker):
            with self._nested.waiting(asker, name):
                await load(name)

    def is_stale(self, plan: LoadPlan, served: Iterable[ServedModel]) -> bool:
        """True if the models that ``plan`` needs differ from those of the last try, or from those that ``served``
        call."""
        try:
            needed: frozenset[ServedModel] | None = frozenset(self._find(plan).values())
        except HeadraceError:
            needed = None
        return needed != self._tried.get(plan.name) or any(frozenset(model.others) != needed for model in served)

    @contextmanager
    def keeping(self, plan: LoadPlan) -> Iterator[Needed]:
        """Return what ``plan`` needs, kept for the version that is loaded with it, or until the context raises.

        Raises `ConfigError` or `InvalidArgument` if something is missing, or needs ``plan`` itself.
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
                model.release()
            raise

    def _find(self, plan: LoadPlan) -> Needed:
        if not plan.dependencies:
            return {}
        if circle := self._circle(plan):
            more = f" ({' -> '.join(circle)})" if len(circle) > 3 else ""
            raise ConfigError(
                f"circular dependency between {kind_of(plan.config)}s: {plan.name} -> ... -> {circle[-2]} -> "
                f"{plan.name}{more}"
            )
        unknown = sorted({d.model for d in plan.dependencies if d.model not in self._records})
        if unknown:
            raise InvalidArgument(
                f"{kind_of(plan.config)} {plan.name} contains models that are not available or ambiguous: "
                f"{', '.join(unknown)}"
            )
        return {dependency: self._served(plan, dependency) for dependency in plan.dependencies}

    def _served(self, plan: LoadPlan, needed: Dependency) -> ServedModel:
        record = self._records[needed.model]
        served = {number: v.served for number, v in record.versions.items() if v.served is not None}
        says = f"{kind_of(plan.config)} '{plan.name}' depends on '{needed.model}'"
        if not served:
            failed = (f"version {n} is at UNAVAILABLE state: {v.reason};" for n, v in record.versions.items())
            why = record.problem or " ".join(failed)
            raise InvalidArgument(
                f"{says} which has no loaded version. Model '{needed.model}' loading failed with error: {why}"
            )
        model = served.get(max(served) if needed.version < 0 else needed.version)
        if model is None:
            raise InvalidArgument(f"{says} whose required version {needed.version} is not loaded.")
        return model

    def _circle(self, plan: LoadPlan) -> list[str]:
        """Return the models from ``plan`` to ``plan`` of which each needs the next; empty if there is no circle."""
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
