"""The memory budget: what each model is charged on each device, from before its load until it has left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

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
        return {device: size for device, size in self._over(needed, set(without)).items() if size > 0}

    def _over(self, needed: Iterable[Mapping[str, int]], gone: Collection[str]) -> dict[str, int]:
        """Return by device the bytes above the budget; below 0 if there is room."""
        more = list(needed)
        kept = [charge for name, charge in self.charges.items() if name not in gone]
        return {
            device: sum(each.get(device, 0) for each in kept) + sum(each.get(device, 0) for each in more) - limit
            for device, limit in self.limits.items()
        }

    def _add(self, over: dict[str, int], name: str, sign: int) -> dict[str, int]:
        charge = self.charges.get(name, {})
        return {device: size + sign * charge.get(device, 0) for device, size in over.items()}

    def impossible(
        self, needed: Mapping[str, Mapping[str, int]], pinned: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    ) -> str:
        """Return why ``needed``, by model, could not be loaded even if only ``pinned`` were; empty if it could."""
        for device, limit in self.limits.items():
            total = sum(each.get(device, 0) for each in needed.values())
            stays = {name: each[device] for name, each in pinned.items() if each.get(device, 0)}
            if total + sum(stays.values()) > limit:
                flag = "--on-demand-memory" if device == HOST else "--on-demand-gpu-memory"
                parts = {name: each.get(device, 0) for name, each in needed.items() if each.get(device, 0)}
                beside = f" beside the pinned models{_parts(stays)}" if stays else ""
                return (
                    f"it needs {shown(total)} on {device}{_parts(parts) if len(parts) > 1 else ''}{beside}, and all "
                    f"models together may use {shown(limit)} ({flag})"
                )
        return ""

    def victims(
        self,
        needed: Collection[Mapping[str, int]],
        residents: Mapping[str, ModelState],
        kept: Iterable[str],
        leaving: Iterable[str],
        may_go: Callable[[ModelState], bool],
        partly: bool = False,
    ) -> list[ModelState] | None:
        """Return the models to evict so that ``needed`` fits, the least recently used first, each after those that need
        it. Empty if it is enough that those who are ``leaving`` have left. If that is not possible now: None, or with
        ``partly`` all that may go.

        ``kept`` stay, and so does a model that a resident one needs that stays. ``may_go`` says which of the others go.
        """
        stay, gone = set(kept), set(leaving)
        chosen: dict[str, ModelState] = {}
        over, dependents = self._over(needed, gone), _dependents(residents)
        for state in sorted(residents.values(), key=lambda each: each.used_ns):
            if _fits(over):
                break
            group = [each for each in _with_dependents(state, dependents) if each.name not in chosen]
            if all(each.name not in stay and may_go(each) for each in group):
                for each in group:
                    chosen[each.name] = each
                    over = self._add(over, each.name, -1)
        return self._without_needless(chosen, over) if partly or _fits(over) else None

    def _without_needless(self, chosen: dict[str, ModelState], over: dict[str, int]) -> list[ModelState]:
        """Return ``chosen`` without models whose memory is not needed, now that the others go. The most recently used
        is spared first. ``over`` is what is above the budget without all of them."""
        for state in reversed(list(chosen.values())):
            with_it = self._add(over, state.name, 1)
            if _fits(with_it) and not any(name in chosen for name in state.needed):
                del chosen[state.name]
                over = with_it
        return list(chosen.values())


def _fits(over: Mapping[str, int]) -> bool:
    return all(size <= 0 for size in over.values())


def _dependents(residents: Mapping[str, ModelState]) -> Mapping[str, Sequence[ModelState]]:
    """Return the resident models that need a model, by its name."""
    found: dict[str, list[ModelState]] = {}
    for state in residents.values():
        for name in state.needed:
            found.setdefault(name, []).append(state)
    return found


def _with_dependents(state: ModelState, dependents: Mapping[str, Sequence[ModelState]]) -> list[ModelState]:
    """Return ``state`` after the resident models that need it, directly or through others, each after those that need
    it."""
    found: list[ModelState] = []
    for other in dependents.get(state.name, ()):
        found += [each for each in _with_dependents(other, dependents) if each not in found]
    return [*found, state]


def _parts(sizes: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name}: {shown(size)}' for name, size in sizes.items())})"
