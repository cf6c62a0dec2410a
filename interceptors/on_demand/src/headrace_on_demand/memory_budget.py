"""The memory budget: the charge of each model on each device, from before its load until after its unload."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

from headrace_on_demand.model_state import ModelState, format_size

HOST = "host"


class MemoryBudget:
    """Charges in bytes by model and device, and ``limits`` by device. A device may have no limit."""

    def __init__(self, limits: Mapping[str, int]) -> None:
        self.limits = limits
        #: By model, the bytes on each device.
        self.charges: dict[str, Mapping[str, int]] = {}

    def used(self, device: str) -> int:
        """Return the sum of the charges on ``device``."""
        return sum(charge.get(device, 0) for charge in self.charges.values())

    def excess(self, needed: Iterable[Mapping[str, int]] = (), without: Iterable[str] = ()) -> dict[str, int]:
        """Return the bytes above the budget by device, with the charges ``needed`` and without the models
        ``without``."""
        return {device: size for device, size in self._over(needed, set(without)).items() if size > 0}

    def _over(self, needed: Iterable[Mapping[str, int]], without: Collection[str]) -> dict[str, int]:
        """Return the bytes above the budget by device; negative if there is room."""
        more = list(needed)
        charges = [charge for name, charge in self.charges.items() if name not in without]
        return {
            device: sum(each.get(device, 0) for each in charges) + sum(each.get(device, 0) for each in more) - limit
            for device, limit in self.limits.items()
        }

    def _add(self, over: dict[str, int], name: str, sign: int) -> dict[str, int]:
        charge = self.charges.get(name, {})
        return {device: size + sign * charge.get(device, 0) for device, size in over.items()}

    def why_impossible(
        self, needed: Mapping[str, Mapping[str, int]], pinned: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    ) -> str:
        """Return why the models ``needed`` do not fit beside ``pinned`` alone; empty if they fit."""
        for device, limit in self.limits.items():
            total = sum(each.get(device, 0) for each in needed.values())
            stays = {name: each[device] for name, each in pinned.items() if each.get(device, 0)}
            if total + sum(stays.values()) > limit:
                flag = "--on-demand-memory" if device == HOST else "--on-demand-gpu-memory"
                parts = {name: each.get(device, 0) for name, each in needed.items() if each.get(device, 0)}
                by_model = _parts(parts) if len(parts) > 1 else ""
                beside = f" beside the pinned models{_parts(stays)}" if stays else ""
                return (
                    f"it needs {format_size(total)} on {device}{by_model}{beside}, and all "
                    f"models together may use {format_size(limit)} ({flag})"
                )
        return ""

    def victims(
        self,
        needed: Collection[Mapping[str, int]],
        residents: Mapping[str, ModelState],
        kept: Iterable[str],
        evicting: Iterable[str],
        is_evictable: Callable[[ModelState], bool],
        partly: bool = False,
    ) -> list[ModelState] | None:
        """Return the models to evict so that ``needed`` fits: least recently used first, dependents before
        dependencies.

        The models in ``evicting`` count as unloaded. The models in ``kept``, and their dependencies, are not evicted,
        nor others for which ``is_evictable`` is false. If ``needed`` cannot fit: None, or with ``partly`` all evictable
        models.
        """
        stay, unloaded = set(kept), set(evicting)
        chosen: dict[str, ModelState] = {}
        over, dependents = self._over(needed, unloaded), _dependents(residents)
        for state in sorted(residents.values(), key=lambda each: each.used_ns):
            if _fits(over):
                break
            group = [each for each in _with_dependents(state, dependents) if each.name not in chosen]
            if all(each.name not in stay and is_evictable(each) for each in group):
                for each in group:
                    chosen[each.name] = each
                    over = self._add(over, each.name, -1)
        return self._drop_needless(chosen, over) if partly or _fits(over) else None

    def _drop_needless(self, chosen: dict[str, ModelState], over: dict[str, int]) -> list[ModelState]:
        """Remove from ``chosen`` the models whose eviction is not needed, most recently used first. Return the rest.

        ``over`` is the excess without all of ``chosen``.
        """
        for state in reversed(list(chosen.values())):
            with_it = self._add(over, state.name, 1)
            if _fits(with_it) and not any(name in chosen for name in state.needed):
                del chosen[state.name]
                over = with_it
        return list(chosen.values())


def _fits(over: Mapping[str, int]) -> bool:
    return all(size <= 0 for size in over.values())


def _dependents(residents: Mapping[str, ModelState]) -> Mapping[str, Sequence[ModelState]]:
    """Return the resident dependents of each model, by its name."""
    found: dict[str, list[ModelState]] = {}
    for state in residents.values():
        for name in state.needed:
            found.setdefault(name, []).append(state)
    return found


def _with_dependents(state: ModelState, dependents: Mapping[str, Sequence[ModelState]]) -> list[ModelState]:
    """Return ``state`` after its direct and indirect resident dependents, dependents before dependencies."""
    found: list[ModelState] = []
    for other in dependents.get(state.name, ()):
        found += [each for each in _with_dependents(other, dependents) if each not in found]
    return [*found, state]


def _parts(sizes: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{name}: {format_size(size)}' for name, size in sizes.items())})"
