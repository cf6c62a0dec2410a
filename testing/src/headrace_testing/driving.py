"""The backend under test: its claims, and its use in a server or directly."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
    """The backend, its claims, and how to run it.

    ``plugin`` is the module of the entry point, ``backend`` the name in configs. ``heavy`` are modules that importing
    the plugin must not import. The claims:

    - ``max_batch``: the rows of one execution.
    - ``zero_rows``: a batch without rows is answered without rows. False if the engine refuses it.
    - ``thread_bound``: instances run only on the thread that loaded them.
    """

    plugin: ClassVar[str]
    backend: ClassVar[str]
    heavy: ClassVar[tuple[str, ...]] = ()
    max_batch: ClassVar[int] = 8
    zero_rows: ClassVar[bool] = True
    thread_bound: ClassVar[bool] = False
    #: The maximum growth of memory in 40 reloads. Allocators keep some.
    reload_growth_bytes: ClassVar[int] = 8 << 20

    def example_of(self, kind: str, directory: Path) -> Example | None:
        """Return an example for one data type (``FP16``, ``BYTES``, ...), or for ``SCALAR``, one value per row.

        Write its files to ``directory``. None leaves the claim untested.
        """
        return None

    @property
    def backend_class(self) -> type[Backend]:
        return backend_class(self.plugin, self.backend)

    def driver(self, example: Example, extra: str = "") -> Driver:
        """Return a driver for the example's model. ``extra`` is more config text."""
        config = example.describe(self.backend, self.max_batch, extra)
        return Driver(self.backend_class, config, example.path)

    @contextmanager
    def serving(self, example: Example, repository: Path, extra: str = "", **options: Any) -> Iterator[Server]:
        """Yield a server with the example's model."""
        write_model(repository, example.describe(self.backend, self.max_batch, extra), example.path)
        with serve(repository, **options) as server:
            yield server

    def not_claimed(self, what: str) -> NoReturn:
        """Skip this check, with a line in the summary."""
        pytest.skip(f"{NOT_RUN}{self.backend}: {what}")

    def require_batching(self, example: Example) -> int:
        """Return the rows of one execution, at least 4. Skip the check if the model has no batch axis."""
        size = example.describe(self.backend, self.max_batch).max_batch_size
        if size < 4:
            self.not_claimed(f"batches of four rows are not claimed (max_batch is {size})")
        return size


def part_of(plugin: str, kind: str, name: str) -> Any:
    """Return the class ``name`` of the parts of ``kind`` that the module ``plugin`` registers."""
    hook = getattr(importlib.import_module(plugin), f"register_{kind}s")
    assert hasattr(hook, "headrace_impl"), f"'{plugin}' has {hook.__name__} without @hookimpl: no server calls it"
    by_name = {part.name: part for part in hook()}
    assert name in by_name, f"plugin '{plugin}' registers {sorted(by_name)}, not '{name}'"
    return by_name[name]


def backend_class(plugin: str, backend: str) -> type[Backend]:
    """Return the backend class ``backend`` that the module ``plugin`` registers."""
    found: type[Backend] = part_of(plugin, "backend", backend)
    return found


def assert_installed(kind: str, name: str, plugin: str, names: Collection[str]) -> None:
    """Fail unless ``name`` is among ``names``, the parts of ``kind`` that a server finds."""
    assert name in names, (
        f"no installed distribution brings {kind} '{name}', only {', '.join(names)}; add an entry point of the group "
        f'headrace: {name} = "{plugin}"'
    )


class Driver:
    """One version of a model. Its instances are loaded and run on threads of their own."""

    def __init__(self, cls: type[Backend], config: ModelConfig, version_path: Path) -> None:
        self.backend = cls({})
        model = Model(NAME, 1, version_path, ModelConfig.FromString(config.SerializeToString()))
        self.backend.complete_config(
            replace(model, parameters=parse_parameters(cls.Parameters, model.config.parameters))
        )
        self._model = replace(model, parameters=parse_parameters(cls.Parameters, model.config.parameters))

    @contextmanager
    def shared(self) -> Iterator[Model]:
        """Yield the model with the objects that its instances share. Release them at the end."""
        shared = self.backend.share(self._model)
        try:
            yield replace(self._model, shared=shared)
        finally:
            self.backend.unshare(shared)

    @contextmanager
    def instance(self, model: Model, number: int = 0) -> Iterator[LoadedInstance]:
        """Yield instance ``number``, loaded. Close it at the end."""
        device = Device(self.backend.devices[-1])
        own = replace(model, instance_name=f"{NAME}_0_{number}", device=device)
        with ThreadPoolExecutor(1, thread_name_prefix=own.instance_name) as thread:
            instance = thread.submit(self.backend.load, own).result()
            try:
                thread.submit(instance.warm_up).result()
                yield LoadedInstance(instance, InstanceHarness(instance, model.config), thread)
            finally:
                thread.submit(instance.close).result()

    @contextmanager
    def loaded(self) -> Iterator[LoadedInstance]:
        """Yield one instance with its own shared objects."""
        with self.shared() as model, self.instance(model) as instance:
            yield instance


class LoadedInstance:
    """A loaded instance."""

    def __init__(self, instance: AnyInstance, harness: InstanceHarness, thread: ThreadPoolExecutor) -> None:
        self.instance = instance
        self._harness, self._thread = harness, thread

    def infer(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the outputs, or raise the error."""
        (answer,) = self.on_its_thread(lambda: self.run([self.ticket(inputs)]))
        return outputs_of(answer)

    def ticket(self, inputs: Mapping[str, Tensor], check: bool = True) -> Ticket:
        """Return the ticket of a request, as a scheduler gets it. If ``check`` is false, the request may be invalid."""
        ticket = Ticket(InferRequest(NAME, inputs), lambda answer, final: None)
        if check:
            self._harness.check(ticket)
        return ticket

    def run(self, tickets: Sequence[Ticket]) -> Sequence[Answer]:
        """Run one execution on the calling thread, until every request has its last answer."""
        return self._harness.run(tickets)

    def on_its_thread(self, call: Callable[[], T]) -> T:
        return self._thread.submit(call).result()


def error_of(call: Callable[[], object]) -> Exception | None:
    """Return the exception of ``call``, or None if it returns."""
    try:
        call()
    except Exception as error:
        return error
    return None


def outputs_of(answer: Answer) -> dict[str, Tensor]:
    """Return the outputs of an answer. Raise it if it is an error."""
    if isinstance(answer, HeadraceError):
        raise answer
    assert isinstance(answer, InferResponse)
    return dict(answer.outputs)
