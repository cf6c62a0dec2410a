"""Calls between models that could never be answered, because those who could are waiting for them.

An instance that executes a request and, for it, waits for another model is held until that model
answers. Calls and held instances form a graph; a call is part of a knot if it waits in a queue,
and no instance that could take it, nor any that these wait for in turn, is free to go on. Nothing
but an error ends a knot, so that finding it late is no mistake, and finding it from a picture that
is a moment old would be: a call is refused when it was stuck in two looks, `LOOK_S` apart.

Only what changed since the last look is looked at. Event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from penstock.messages.request import InferRequest
from penstock.workers.host import Host

#: Between two looks. A call that cannot be answered is refused after one to two of them.
LOOK_S = 0.02


class Target(Protocol):
    """What is needed of a `penstock.models.served.ServedModel`."""

    name: str

    @property
    def hosts(self) -> Sequence[Host]: ...

    def has_waiting(self, request: InferRequest) -> bool: ...


class Knots:
    """Calls that hosts wait for. ``refuse`` is called with one of each knot, and its path."""

    def __init__(self, loop: asyncio.AbstractEventLoop, refuse: Callable[[InferRequest, Sequence[str]], None]) -> None:
        self._loop = loop
        self._refuse = refuse
        self._calls: dict[Host, dict[InferRequest, Target]] = {}
        #: What may have become part of a knot, with its host and the number of looks that found it stuck.
        self._suspects: dict[InferRequest, tuple[Host, int]] = {}
        self._bereft: set[Host] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, host: Host, request: InferRequest, target: Target) -> None:
        """``host`` has sent ``request``, which ``target`` has accepted."""
        self._calls.setdefault(host, {})[request] = target
        self._suspects[request] = host, 0
        self._look_soon()

    def discard(self, host: Host, request: InferRequest) -> None:
        """``request`` is answered."""
        calls = self._calls[host]
        del calls[request]
        self._suspects.pop(request, None)
        if calls:  # those that are left may be all that the host waits for now
            self._bereft.add(host)
            self._look_soon()
        else:
            del self._calls[host]

    def _look_soon(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        for host in self._bereft:
            for request in self._calls.get(host, ()):
                self._suspects.setdefault(request, (host, 0))
        self._bereft.clear()
        for request, (host, times) in reversed(list(self._suspects.items())):  # the last one has closed the knot
            target = self._calls[host][request]
            if not target.has_waiting(request) or not self._is_stuck(target.hosts):
                del self._suspects[request]
            elif times:
                del self._suspects[request]
                self._refuse(request, self._path(request, target))
            else:
                self._suspects[request] = host, 1
        if self._suspects:
            self._look_soon()

    def _is_stuck(self, hosts: Iterable[Host]) -> bool:
        """Whether all of ``hosts``, and whatever they wait for, wait."""
        reached: set[Host] = set()
        coming = list(hosts)
        while coming:
            host = coming.pop()
            if host not in reached:
                reached.add(host)
                needed = self._needs(host)
                if needed is None:
                    return False
                coming += needed
        return bool(reached)

    def _needs(self, host: Host) -> list[Host] | None:
        """Those of which one must go on before ``host`` can; None if it can by itself."""
        found: list[Host] = []
        for request, target in self._held_by(host):
            needed = self._able(request, target)
            if needed is None:
                return None
            found += needed
        return found or None

    def _held_by(self, host: Host) -> Iterator[tuple[InferRequest, Target]]:
        """The calls that hold ``host``: those sent for what it is executing."""
        executing = host.executing if host.alive else ()
        calls: Mapping[InferRequest, Target] = self._calls.get(host, {}) if executing else {}
        return ((call, target) for call, target in calls.items() if call.caller is None or call.caller in executing)

    def _able(self, request: InferRequest, target: Target) -> list[Host] | None:
        """The hosts of which one must go on to answer ``request``; None if that needs no host."""
        if target.has_waiting(request):
            return list(target.hosts)
        executing = [host for host in target.hosts if request in host.executing]
        if executing:
            return executing
        # Its execution has returned, and its answer comes from elsewhere: perhaps from calls in turn.
        found: list[Host] = []
        for call, further in self._sent_for(request, target):
            needed = self._able(call, further)
            if needed is None:
                return None
            found += needed
        return found or None

    def _sent_for(self, request: InferRequest, target: Target) -> list[tuple[InferRequest, Target]]:
        return [
            (call, further)
            for host in target.hosts
            for call, further in self._calls.get(host, {}).items()
            if call.caller is request
        ]

    def _path(self, request: InferRequest, target: Target) -> list[str]:
        """The names along the knot; the last has been there before."""
        if target.name in request.callers:
            return [*request.callers[request.callers.index(target.name) :], target.name]
        names = list(request.callers[-1:])
        while target.name not in names:
            names.append(target.name)
            _, target = next(self._held_by(target.hosts[0]))
        return [*names, target.name]
