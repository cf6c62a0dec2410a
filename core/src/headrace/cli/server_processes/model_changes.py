"""Loads and unloads by name, made by all servers that share the ports, or by those that come later before they serve.

A request for one reaches any of them (`headrace.models.control.Control.relay`), which asks the supervisor; the
supervisor asks all, itself included, and answers when all have answered. One change is made after the other.
"""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import HeadraceError, InternalError, Unavailable

if TYPE_CHECKING:
    from headrace.models.control import Control

#: As JSON: what `write_load` or `write_unload` wrote.
Change = list[Any]


def write_load(name: str, parameters: Mapping[str, str | bytes]) -> Change:
    """A load; files travel in base64, in a list."""
    told = {key: each if isinstance(each, str) else [b64encode(each).decode()] for key, each in parameters.items()}
    return ["load", name, told]


def write_unload(name: str, unload_dependents: bool) -> Change:
    return ["unload", name, unload_dependents]


async def apply(change: Change, control: Control) -> None:
    """Make it in this server. Raises `HeadraceError`."""
    kind, name, how = change
    if kind == "load":
        parameters = {key: each if isinstance(each, str) else b64decode(each[0]) for key, each in how.items()}
        await control.load_here(name, parameters)
    else:
        await control.unload_here(name, how)


class ChangingServer(Protocol):
    """What is needed of a `ServerProcess`."""

    name: str
    is_dead: bool

    async def ask(self, method: str, *arguments: Any) -> Any: ...


class ModelChanges:
    """In the supervisor. Event loop only."""

    def __init__(self) -> None:
        self._joined: list[ChangingServer] = []
        #: What was asked last of each model, by its name, in the order in which it was asked.
        self._last: dict[str, Change] = {}
        self._turn = asyncio.Lock()

    async def join(self, server: ChangingServer) -> list[Change]:
        """What ``server``, which has loaded what a start loads, is to change before it serves; from now on it is asked
        for all that is changed."""
        async with self._turn:
            self._joined = [each for each in self._joined if not each.is_dead] + [server]
            return list(self._last.values())

    async def make(self, change: Change) -> None:
        """Have all servers make ``change``. Those that die meanwhile are followed by others, which make it before they
        serve.

        Raises what the first says where all refuse it; they are as they were. Raises `InternalError` that says how far
        it has come if only some do: then they differ, until it is asked for again, or undone.
        """
        async with self._turn:
            asked = [each for each in self._joined if not each.is_dead]
            outcomes = await asyncio.gather(*(each.ask("change", change) for each in asked), return_exceptions=True)
            made, failed = 0, []
            for server, outcome in zip(asked, outcomes, strict=True):
                if isinstance(outcome, HeadraceError):
                    if not server.is_dead:
                        failed.append((server, outcome))
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    made += 1
            if made and not failed:
                self._last.pop(change[1], None)
                self._last[change[1]] = change
                return
        if not failed:
            raise Unavailable("every worker has died; the model is as it was")
        server, error = failed[0]
        if not made:
            raise error
        raise InternalError(
            f"'{change[1]}' has been {change[0]}ed by {made} of {made + len(failed)} workers, which differ now; "
            f"{server.name}: {error.message}"
        )


class SharedControl:
    """In a server: has its changes made by all, and makes those of the others. ``ask`` calls the supervisor."""

    def __init__(self, ask: Callable[..., Awaitable[Any]], control: Control) -> None:
        self._ask, self._control = ask, control
        #: What was changed before this server joined comes first.
        self._turn = asyncio.Lock()

    async def join(self) -> None:
        """Make what was changed since the start. Raises `HeadraceError`."""
        async with self._turn:
            for change in await self._ask("join"):
                await apply(change, self._control)
            self._control.relay = self

    async def make(self, change: Change) -> None:
        async with self._turn:
            await apply(change, self._control)

    async def load(self, name: str, parameters: Mapping[str, str | bytes]) -> None:
        """Have it loaded by all. Raises `HeadraceError`."""
        await self._ask("make", write_load(name, parameters))

    async def unload(self, name: str, unload_dependents: bool) -> None:
        """Have it unloaded by all. Raises `HeadraceError`."""
        await self._ask("make", write_unload(name, unload_dependents))
