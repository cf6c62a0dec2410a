"""What every check knows about the backend under test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import pytest

from headrace.backends.base import Backend
from headrace.server import Server
from headrace.testing.driving import Driver, backend_class
from headrace.testing.example import Example, write_model
from headrace.testing.plugin import NOT_RUN
from headrace.testing.serving import serve


class Subject:
    """The backend, what it claims, and how to get it running.

    ``plugin`` is the module of the entry point, ``backend`` the name in configs, ``heavy`` the
    modules that importing the plugin must not import. The claims: ``max_batch`` rows in one
    execution; ``zero_rows``, that a batch of no rows at all is answered with no rows, as arithmetic
    gives it, where an engine that refuses it says False; ``thread_bound``, that instances may only run
    on the thread that loaded them.
    """

    plugin: ClassVar[str]
    backend: ClassVar[str]
    heavy: ClassVar[tuple[str, ...]] = ()
    max_batch: ClassVar[int] = 8
    zero_rows: ClassVar[bool] = True
    thread_bound: ClassVar[bool] = False
    #: Memory that fifty reloads may add, in bytes: allocators keep some.
    reload_growth_bytes: ClassVar[int] = 8 << 20

    def example_of(self, kind: str, directory: Path) -> Example | None:
        """An example for one data type (``FP16``, ``BYTES``, ...) or for ``SCALAR``, a model with
        one value per row. Write its files into ``directory``; None leaves the claim untested."""
        return None

    @property
    def backend_class(self) -> type[Backend]:
        return backend_class(self.plugin, self.backend)

    def driver(self, example: Example, extra: str = "") -> Driver:
        """The example's model, to be driven directly. ``extra`` is more config text."""
        config = example.describe(self.backend, self.max_batch, extra)
        return Driver(self.backend_class, config, example.path)

    @contextmanager
    def serving(self, example: Example, repository: Path, extra: str = "", **options: Any) -> Iterator[Server]:
        """A server that holds the example's model."""
        write_model(repository, example.describe(self.backend, self.max_batch, extra), example.path)
        with serve(repository, **options) as server:
            yield server

    def not_claimed(self, what: str) -> NoReturn:
        """Skip this check, and have the summary say so."""
        pytest.skip(f"{NOT_RUN}{self.backend}: {what}")

    def require_batching(self, example: Example) -> int:
        """Rows in one execution, at least 4; skips where the model has no batch axis."""
        size = example.describe(self.backend, self.max_batch).max_batch_size
        if size < 4:
            self.not_claimed(f"batches of four rows are not claimed (max_batch is {size})")
        return size
