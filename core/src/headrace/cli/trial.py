"""Loads one model after the other as ``headrace serve`` does, to hear what only a load can tell."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType

from headrace.config.options import ServerOptions
from headrace.errors import HeadraceError
from headrace.server import Server


@dataclass(frozen=True, slots=True)
class LoadRefusal:
    """Why a version is not served; version 0 stands for all. ``code`` is the printed name of an error code."""

    version: int
    code: str
    message: str


class Trial:
    """A server without ports, as a context manager. Models are loaded, warmed up and unloaded."""

    def __init__(self, options: ServerOptions) -> None:
        """Raises `ConfigError` as `Server` does."""
        self._server = Server(replace(options, model_control_mode="explicit", load_model=()))

    def __enter__(self) -> Trial:
        with _stdout_aside():
            self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _stdout_aside():
            self._server.__exit__(kind, error, trace)

    def load(self, name: str) -> list[LoadRefusal]:
        """Load ``name`` and give it up again; what refused."""
        with _stdout_aside():
            return asyncio.run_coroutine_threadsafe(self._try(name), self._server.loop).result()

    async def _try(self, name: str) -> list[LoadRefusal]:
        try:
            await self._server.load(name)
        except HeadraceError as error:
            return list(self._refusals(name)) or [LoadRefusal(0, error.code.value, error.message)]
        finally:
            await self._server.unload(name)
        return []

    def _refusals(self, name: str) -> Iterator[LoadRefusal]:
        for entry in self._server.index():
            if entry.name == name and entry.reason and entry.version:
                code, _, message = entry.reason.partition(": ")
                yield LoadRefusal(int(entry.version), code, message)


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """What models print goes to stderr, from processes of theirs, too: stdout is for the reports."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
