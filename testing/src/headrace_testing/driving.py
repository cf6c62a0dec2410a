"""The backend under test: what it claims, and how it is run, in a server or driven directly, without one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import pytest

from headrace import (
    Answer,
    AnyInstance,
    Backend,
    Device,
    HeadraceError,
    InferRequest,
    InferResponse,
    InstanceHarness,
    Model,
    ModelConfig,
    Server,
    Tensor,
    Ticket,
    parse_parameters,
)
from headrace_testing.example import NAME, Example, write_model
from headrace_testing.plugin import NOT_RUN
from headrace_testing.serving import serve

T = TypeVar("T")


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


def part_of(plugin: str, kind: str, name: str) -> Any:
    """The class called ``name`` that the module ``plugin`` registers among the parts of ``kind``."""
    hook = getattr(importlib.import_module(plugin), f"register_{kind}s")
    assert hasattr(hook, "headrace_impl"), f"'{plugin}' has {hook.__name__} without @hookimpl: no server calls it"
    named = {part.name: part for part in hook()}
    assert name in named, f"plugin '{plugin}' registers {sorted(named)}, not '{name}'"
    return named[name]


def backend_class(plugin: str, backend: str) -> type[Backend]:
    """The class called ``backend`` that the module ``plugin`` registers."""
    found: type[Backend] = part_of(plugin, "backend", backend)
    return found


class Driver:
    """One version of a model, whose instances are loaded and run on threads of their own."""

    def __init__(self, cls: type[Backend], config: ModelConfig, version_path: Path) -> None:
        self.backend = cls({})
        model = Model(NAME, 1, version_path, ModelConfig.FromString(config.SerializeToString()))
        self.backend.complete_config(
            replace(model, parameters=parse_parameters(cls.Parameters, model.config.parameters))
        )
        self._model = replace(model, parameters=parse_parameters(cls.Parameters, model.config.parameters))

    @contextmanager
    def shared(self) -> Iterator[Model]:
        """The model with what its instances share; released at the end."""
        shared = self.backend.share(self._model)
        try:
            yield replace(self._model, shared=shared)
        finally:
            self.backend.unshare(shared)

    @contextmanager
    def instance(self, model: Model, number: int = 0) -> Iterator[Driven]:
        """Instance ``number``, loaded; closed at the end."""
        device = Device(self.backend.devices[-1])
        own = replace(model, instance_name=f"{NAME}_0_{number}", device=device)
        with ThreadPoolExecutor(1, thread_name_prefix=own.instance_name) as thread:
            instance = thread.submit(self.backend.load, own).result()
            try:
                thread.submit(instance.warm_up).result()
                yield Driven(instance, InstanceHarness(instance, model.config), thread)
            finally:
                thread.submit(instance.close).result()

    @contextmanager
    def loaded(self) -> Iterator[Driven]:
        """One instance of its own."""
        with self.shared() as model, self.instance(model) as driven:
            yield driven


class Driven:
    """A loaded instance."""

    def __init__(self, instance: AnyInstance, harness: InstanceHarness, thread: ThreadPoolExecutor) -> None:
        self.instance = instance
        self._harness, self._thread = harness, thread

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs, or the error raised."""
        (answer,) = self.on_its_thread(lambda: self.run([self.ticket(inputs)]))
        return outputs_of(answer)

    def ticket(self, inputs: Mapping[str, Tensor], check: bool = True) -> Ticket:
        """That of a request, as the scheduler would own it; unchecked, the request may break every rule."""
        ticket = Ticket(InferRequest(NAME, inputs), lambda answer, final: None)
        if check:
            self._harness.check(ticket)
        return ticket

    def run(self, tickets: Sequence[Ticket]) -> Sequence[Answer]:
        """One execution on the calling thread, until every request has its last answer."""
        return self._harness.run(tickets)

    def on_its_thread(self, call: Callable[[], T]) -> T:
        return self._thread.submit(call).result()


def error_of(call: Callable[[], object]) -> Exception | None:
    """What ``call`` raises, or None if it returns."""
    try:
        call()
    except Exception as error:
        return error
    return None


def outputs_of(answer: Answer) -> dict[str, Tensor]:
    """The outputs of an answer; raises it if it is an error."""
    if isinstance(answer, HeadraceError):
        raise answer
    assert isinstance(answer, InferResponse)
    return dict(answer.outputs)
