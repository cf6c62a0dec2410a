"""Loads and unloads that models ask for while they are being loaded themselves. Event loop only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from headrace.errors import InvalidArgument
from headrace.models.places import Places


class Loads:
    """Knows which models, not loaded yet, wait for which, and refuses what they would wait for in a circle.

    While one waits, its place among ``places`` is lent to others.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._waiting: dict[str, list[str]] = {}

    async def run(self, asker: str, target: str, work: Callable[[], Awaitable[None]]) -> None:
        """Await ``work`` on ``target``, for which the load of ``asker`` waits.

        Raises `InvalidArgument` naming the path if the load of ``target`` waits for that of
        ``asker``, and what ``work`` raises.
        """
        if path := self._path(target, asker):
            shown = " -> ".join(f"'{name}'" for name in (asker, *path))
            raise InvalidArgument(f"model '{asker}' is being loaded, and would wait for itself: {shown}")
        targets = self._waiting.setdefault(asker, [])
        targets.append(target)
        try:
            async with self._places.lent():
                await work()
        finally:
            targets.remove(target)
            if not targets:
                self._waiting.pop(asker, None)

    def _path(self, start: str, end: str) -> list[str]:
        """The models from ``start`` on of which each waits for the next, up to ``end``; empty if there is no way."""
        ways, seen = [[start]], {start}
        while ways:
            way = ways.pop()
            if way[-1] == end:
                return way
            further = [name for name in self._waiting.get(way[-1], ()) if name not in seen]
            seen.update(further)
            ways += ([*way, name] for name in further)
        return []
