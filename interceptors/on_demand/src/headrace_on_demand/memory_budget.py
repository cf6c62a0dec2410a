"""The memory budget: what each model is charged on each device, from before its load until it has left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace_on_demand.model_state import ModelState, shown

HOST = "host"


class MemoryBudget:
    """``limits`` in bytes by device. A device without a limit is counted, too."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = limits
        #: By model, the bytes on each device.
        self.charges: dict[str, Mapping[str, int]] = {}

    def used(self, device: str) -> int:
        """Return the bytes that all models are charged on ``device``."""
        return sum(charge.get(device, 0) for charge in self.charges.values())

    def excess(self, needed: Iterable[Mapping[str, int]] = (), without: Iterable[str] = ()) -> dict[str, int]:
        """Return by device the bytes beyond the budget, with ``needed`` more, and without some of the models."""
        gone, more = set(without), list(needed)
        found = {}
        for device, limit in self.limits.items():
            kept = sum(charge.get(device, 0) for name, charge in self.charges.items() if name not in gone)
            beyond = kept + sum(each.get(device, 0) for each in more) - limit
            if beyond > 0:
                found[device] = beyond
        return found

    def impossible(self, needed: Mapping[str, Mapping[str, int]]) -> str:
        """Return why ``needed``, by model, could not be loaded even if nothing else were; empty if it could."""
        for device, limit in self.limits.items():
            total = sum(each.get(device, 0) for each in needed.values())
            if total > limit:
                flag = "--on-demand-memory" if device == HOST else "--on-demand-gpu-memory"
                parts = {name: each.get(device, 0) for name, each in needed.items() if each.get(device, 0)}
                what = f" ({', '.join(f'{name}: {shown(size)}' for name, size in parts.items())})"
                return (
                    f"it needs {shown(total)} on {device}{what if len(parts) > 1 else ''}, and all models together may "
                    f"use {shown(limit)} ({flag})"
                )
        return ""

    def victims(
        self,
        needed: Sequence[Mapping[str, int]],
        residents: Mapping[str, ModelState],
        kept: Iterable[str],
        leaving: Iterable[str],
        may_go: Callable[[ModelState], bool],
    ) -> list[ModelState] | None:
        """Return the models to evict so that ``needed`` fits, the least recently used first, each after those that need
        it. None if that is not possible now; empty if it is enough that those who are ``leaving`` have left.

        ``kept`` stay, and so does a model that a resident one needs that stays. ``may_go`` says which of the others go.
        """
        stay, gone = set(kept), set(leaving)
        chosen: dict[str, ModelState] = {}
        for state in sorted(residents.values(), key=lambda each: each.used_ns):
            if not self.excess(needed, gone | chosen.keys()):
                break
            group = [each for each in _with_dependents(state, residents) if each.name not in chosen]
            if all(each.name not in stay and may_go(each) for each in group):
                chosen |= {each.name: each for each in group}
        if self.excess(needed, gone | chosen.keys()):
            return None
        return self._without_needless(list(chosen.values()), needed, residents, gone)

    def _without_needless(
        self,
        chosen: list[ModelState],
        needed: Sequence[Mapping[str, int]],
        residents: Mapping[str, ModelState],
        gone: set[str],
    ) -> list[ModelState]:
        """Return ``chosen`` without models whose memory is not needed, now that the others go. The most recently used
        is spared first."""
        for state in reversed(chosen.copy()):
            rest = [each for each in chosen if each is not state]
            needs = [residents[name] for name in state.needed if name in residents]
            is_enough = not self.excess(needed, gone.union(each.name for each in rest))
            if is_enough and not any(each in rest for each in needs):
                chosen = rest
        return chosen


def _with_dependents(state: ModelState, residents: Mapping[str, ModelState]) -> list[ModelState]:
    """Return ``state`` after the resident models that need it, directly or through others, each after those that need
    it."""
    found: list[ModelState] = []
    for other in residents.values():
        if state.name in other.needed:
            found += [each for each in _with_dependents(other, residents) if each not in found]
    return [*found, state]
