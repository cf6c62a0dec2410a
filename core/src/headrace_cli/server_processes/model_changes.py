"""Applies loads and unloads by name, and changes of extensions, to all servers that share the ports.

A request reaches one server (`headrace.models.control.Control.relay`, `headrace.engine.Engine.relay`). That server
calls the supervisor, and the supervisor calls all servers and answers when all have answered. Changes are applied one
after the other. A server that starts later applies them before it serves.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import HeadraceError, InternalError, Unavailable

if TYPE_CHECKING:
    from headrace.engine import Engine

log = logging.getLogger(__name__)

#: A change as JSON: its kind, the name of a model or an extension, and the rest. Made by the functions ``write_...``.
Change = list[Any]
#: The event, by the kind of the change.
_DONE = {"load": "loaded", "unload": "unloaded", "extension": "changed"}


def write_load(name: str, parameters: Mapping[str, str | bytes]) -> Change:
    """Return a load as a `Change`. Files are base64, in a list of one."""
    encoded = {key: each if isinstance(each, str) else [b64encode(each).decode()] for key, each in parameters.items()}
    return ["load", name, encoded]


def write_unload(name: str, unload_dependents: bool) -> Change:
    return ["unload", name, unload_dependents]


def write_extension(name: str, key: str, change: Any, is_kept: bool) -> Change:
    return ["extension", name, [key, change, is_kept]]


async def apply(change: Change, engine: Engine) -> bool:
    """Apply ``change`` to this server. Return False if there was nothing to do. Raises `HeadraceError`."""
    kind, name, how = change
    if kind == "load":
        parameters = {key: each if isinstance(each, str) else b64decode(each[0]) for key, each in how.items()}
        return await engine.control.load_here(name, parameters)
    if kind == "unload":
        await engine.control.unload_here(name, how)
    else:
        (extension,) = (each for each in engine.extensions if each.name == name)
        await extension.apply(how[1])
    return True


def _replaces(change: Change) -> tuple[str, ...]:
    """Return the key of the changes of which only the last one counts."""
    kind, name, how = change
    return (kind, name, how[0]) if kind == "extension" else ("model", name)


class ChangingServer(Protocol):
    """The part of `ServerProcess` that this module uses."""

    name: str
    is_dead: bool

    async def ask(self, method: str, *arguments: Any) -> Any: ...


class ModelChanges:
    """The changes of all servers, in the supervisor. Event loop only."""

    def __init__(self) -> None:
        self._joined: list[ChangingServer] = []
        #: The changes that no later one replaces, in their order.
        self._last: dict[tuple[str, ...], Change] = {}
        self._turn = asyncio.Lock()

    async def join(self, server: ChangingServer) -> list[Change]:
        """Return the changes that ``server`` must apply before it serves. It gets all later changes, too.

        It has loaded the models that a start loads.
        """
        async with self._turn:
            self._joined = [each for each in self._joined if not each.is_dead] + [server]
            return list(self._last.values())

    async def make(self, change: Change) -> bool:
        """Apply ``change`` to all servers. One that dies meanwhile is replaced, and its successor applies the change.

        Return False if there was nothing to do in any of them.

        If all servers refuse it, raises the error of the first; nothing has changed. If only some refuse it, raises
        `InternalError` with their numbers: the servers differ until the change is repeated or undone.
        """
        async with self._turn:
            alive = [each for each in self._joined if not each.is_dead]
            outcomes = await asyncio.gather(*(each.ask("change", change) for each in alive), return_exceptions=True)
            made, failed, has_changed = 0, [], False
            for server, outcome in zip(alive, outcomes, strict=True):
                if isinstance(outcome, HeadraceError):
                    if not server.is_dead:
                        failed.append((server, outcome))
                elif isinstance(outcome, BaseException):
                    raise outcome
                else:
                    made, has_changed = made + 1, has_changed or bool(outcome)
            if made and not failed:
                self._last.pop(_replaces(change), None)
                if change[0] != "extension" or change[2][2]:
                    self._last[_replaces(change)] = change
                return has_changed
        if not failed:
            raise Unavailable("every worker has died; the model is as it was")
        server, error = failed[0]
        if not made:
            raise error
        raise InternalError(
            f"'{change[1]}' has been {_DONE[change[0]]} by {made} of {made + len(failed)} workers, which differ now; "
            f"{server.name}: {error.message}"
        )


class SharedControl:
    """The changes, in one server: sends its own to all servers, and applies the changes of others.

    ``ask`` calls the supervisor.
    """

    def __init__(self, ask: Callable[..., Awaitable[Any]], engine: Engine) -> None:
        self._ask, self._engine = ask, engine
        #: Held while `join` applies earlier changes, so that later ones wait.
        self._turn = asyncio.Lock()

    async def join(self) -> None:
        """Apply the changes that were made since the start. Raises `HeadraceError`."""
        async with self._turn:
            for change in await self._ask("join"):
                try:
                    await apply(change, self._engine)
                except HeadraceError as error:
                    if change[0] != "extension":
                        raise
                    log.warning("a change of extension '%s' can not be repeated: %s", change[1], error.message)
            self._engine.control.relay, self._engine.relay = self, self._extend

    async def make(self, change: Change) -> bool:
        async with self._turn:
            return await apply(change, self._engine)

    async def load(self, name: str, parameters: Mapping[str, str | bytes]) -> bool:
        """Load the model ``name`` on all servers. Return False if they had nothing to do. Raises `HeadraceError`."""
        is_loaded: bool = await self._ask("make", write_load(name, parameters))
        return is_loaded

    async def unload(self, name: str, unload_dependents: bool) -> None:
        """Unload the model ``name`` on all servers. Raises `HeadraceError`."""
        await self._ask("make", write_unload(name, unload_dependents))

    async def _extend(self, name: str, key: str, change: Any, is_kept: bool) -> None:
        """Change the extension ``name`` on all servers. Raises `HeadraceError`."""
        await self._ask("make", write_extension(name, key, change, is_kept))
