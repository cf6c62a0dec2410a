"""A plugin for the test of a frontend: two backends that double, and an interceptor that records callers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np

from headrace import (
    AnyOperation,
    Backend,
    Caller,
    Instance,
    Interceptor,
    Model,
    Operation,
    Tensors,
    hookimpl,
)


class WaitingInstance(Instance):
    """Waits for ``may``, then doubles ``x``. ``has_begun`` is set when a request arrives."""

    def __init__(self) -> None:
        self.may, self.has_begun = threading.Event(), threading.Event()

    def execute(self, inputs: Tensors) -> Tensors:
        self.has_begun.set()
        self.may.wait(90)
        return {"y": 2 * np.asarray(inputs["x"])}


class WaitingDoubling(Backend):
    """Loads ``instance``, which the test sets."""

    name: ClassVar[str] = "waits"
    instance: ClassVar[WaitingInstance]

    def load(self, model: Model) -> Instance:
        return self.instance


class Doubling(WaitingDoubling):
    """Another backend, with its own instance."""

    name: ClassVar[str] = "doubles"


class Watching(Interceptor):
    """Appends the caller of each request to ``seen``, which the test sets."""

    name: ClassVar[str] = "watching"
    seen: ClassVar[list[Caller]]

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        if operation == Operation.INFER:
            self.seen.append(caller)


@hookimpl
def register_backends() -> list[type[Backend]]:
    return [Doubling, WaitingDoubling]


@hookimpl
def register_interceptors() -> list[type[Interceptor]]:
    return [Watching]


@contextmanager
def installed(module: str) -> Iterator[None]:
    """Make ``module`` a plugin of an installed distribution: servers created in this context find it."""
    with TemporaryDirectory(prefix="headrace-") as folder:
        info = Path(folder, "headrace_testing_frontend-0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-testing-frontend\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[headrace]\nconformance = {module}\n")
        sys.path.insert(0, folder)
        try:
            yield
        finally:
            sys.path.remove(folder)
