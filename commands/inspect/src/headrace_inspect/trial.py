"""Loads and unloads models in a server without ports."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import TracebackType

from headrace import HeadraceError, Server, ServerOptions


@dataclass(frozen=True, slots=True)
class LoadRefusal:
    """The reason why a version did not load. Version 0 means all versions. ``code`` is the printed name of a code."""

    version: int
    code: str
    message: str


class Trial:
    """A context manager for a server without ports, which loads, warms up and unloads models."""

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
        """Load and unload the model ``name``. Return the reasons why versions did not load."""
        with _stdout_aside():
            return asyncio.run_coroutine_threadsafe(self._try(name), self._server.loop).result()

    async def _try(self, name: str) -> list[LoadRefusal]:
        try:
            await self._server.load(name)
        except HeadraceError as error:
            return list(self._refusals(name)) or [LoadRefusal(0, error.code.value, error.message)]
        finally:
            await self._server.unload(name, unload_dependents=True)
        return []

    def _refusals(self, name: str) -> Iterator[LoadRefusal]:
        for entry in self._server.index():
            if entry.name == name and entry.reason and entry.version:
                code, _, message = entry.reason.partition(": ")
                yield LoadRefusal(int(entry.version), code, message)


@contextlib.contextmanager
def _stdout_aside() -> Iterator[None]:
    """Redirect stdout to stderr, also for model processes: stdout is for the reports."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
