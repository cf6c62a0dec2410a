"""The scheduler under test: its claims, its use by a server, and its threads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, NoReturn

import numpy as np
import pytest
from google.protobuf import text_format

from headrace import (
    Cancelled,
    ConfigError,
    FullScheduler,
    InferResponse,
    ModelConfig,
    Problem,
    Scheduler,
    Ticket,
    dtypes,
)
from headrace_testing.driving import error_of, part_of
from headrace_testing.example import NAME, write_model
from headrace_testing.metrics import measured
from headrace_testing.plugin import NOT_RUN
from headrace_testing.serving import serve
from headrace_testing.stage import OTHER, Stage, play

#: In ns.
US = 1000
MS = 1_000_000
MINUTE = 60_000 * MS


class ScheduledSubject:
    """The scheduler, its claims, and how it is put on a stage.

    ``plugin`` is the module of the entry point, ``scheduler`` the name in configs. ``config`` is more text for the
    model's config: ``scheduling_choice``, the scheduler's parameters. The claims:

    - ``max_batch``: the rows of one execution. ``most_rows``: the rows of one request, 0 for no limit.
    - ``delay_ns``: how long a single request waits for others while an instance is idle.
    - ``in_order``: requests that do not differ run in the order of arrival.
    - ``longest_wait_ns``: the longest wait of a request while others keep arriving and each execution takes 10 ms. None
      for no promise.
    - ``timeout_us``: a timeout that requests may have and that is kept, 0 for none. ``postpones``: an expired request
      waits behind all others instead of being rejected.
    - ``levels``: the number of priorities, of which 1 is first; 0 for none.
    - ``any_instance``: any idle instance gets the waiting requests.
    - ``mistakes``: configs that it refuses, as more text for the config; each with the field at fault.
    - ``patience_ns``: the longest time until all requests of the kit are answered.

    A scheduler that needs no instances gets none, and its model has no backend. ``others`` are the names of models that
    it calls: the kit provides them, with an input ``x`` that they return as ``y``.
    """

    plugin: ClassVar[str]
    scheduler: ClassVar[str]
    config: ClassVar[str] = ""
    max_batch: ClassVar[int] = 8
    most_rows: ClassVar[int] = 0
    delay_ns: ClassVar[int] = 0
    in_order: ClassVar[bool] = True
    longest_wait_ns: ClassVar[int | None] = 1000 * MS
    timeout_us: ClassVar[int] = 0
    postpones: ClassVar[bool] = False
    levels: ClassVar[int] = 0
    any_instance: ClassVar[bool] = True
    mistakes: ClassVar[Mapping[str, str]] = MappingProxyType({})
    patience_ns: ClassVar[int] = MINUTE
    others: ClassVar[tuple[str, ...]] = ()

    def fields(self, number: int) -> Mapping[str, Any]:
        """Return fields of `headrace.InferRequest` for request ``number``, besides its rows."""
        return {}

    @property
    def scheduler_class(self) -> type[Scheduler]:
        found: type[Scheduler] = part_of(self.plugin, "scheduler", self.scheduler)
        return found

    @property
    def declared(self) -> type[FullScheduler]:
        """The class of the scheduler, or `headrace.FullScheduler` with the defaults."""
        kind = self.scheduler_class
        return kind if issubclass(kind, FullScheduler) else FullScheduler

    def model_config(self) -> ModelConfig:
        """Return the config of a model that selects the scheduler."""
        config = text_format.Parse(self.config, ModelConfig(name=NAME))
        if self.declared.needs_instances:
            config.backend = config.backend or "identity"
        config.max_batch_size = config.max_batch_size or self.max_batch
        config.parameters["scheduler"].string_value = self.scheduler
        for tensors, name in ((config.input, "x"), (config.output, "y")):
            if not tensors:
                tensors.add(name=name, data_type=dtypes.FP32.config_value, dims=[1])
        return config

    def stage(self, instances: int = 1) -> Stage:
        """Return a stage with this many idle instances, or with none if the scheduler needs none."""
        count = instances if self.declared.needs_instances else 0
        stage = Stage(self.scheduler_class, self.model_config(), count, self.most_rows)
        stage.begin()
        return stage

    def send(self, stage: Stage, count: int = 1, rows: int = 1, **fields: Any) -> list[Ticket]:
        number = len(stage.tickets)
        return [stage.send(rows, **{**self.fields(number + more), **fields}) for more in range(count)]

    async def busy(self, instances: int = 1) -> Stage:
        """Return a stage whose instances are busy, each with a request of its own."""
        self.require_instances()
        stage = self.stage(instances)
        for _ in stage.instances:
            self.send(stage)
            await stage.turn(self.delay_ns)
        if not all(instance.batch for instance in stage.instances):
            self.not_claimed("any idle instance gets what waits is not claimed, so not all can be kept busy")
        return stage

    def require_instances(self) -> None:
        """Skip a check of instances if the scheduler needs none."""
        if not self.declared.needs_instances:
            self.not_claimed("it runs without instances, so what is about them is not checked")

    def not_claimed(self, what: str) -> NoReturn:
        """Skip this check, with a line in the summary."""
        pytest.skip(f"{NOT_RUN}{self.scheduler}: {what}")


def assert_answered(stage: Stage, ticket: Ticket) -> None:
    """Fail unless the caller of ``ticket`` has its own answer, and no other."""
    told = stage.told(ticket)
    assert len(told) == 1, f"request '{ticket.request.id}' is answered {len(told)} times"
    assert isinstance(told[0], InferResponse), f"request '{ticket.request.id}' is told {told[0]!r}"
    assert told[0].id == ticket.request.id, f"request '{ticket.request.id}' gets the answer of '{told[0].id}'"


class ScheduledService(ScheduledSubject):
    """Statistics, the entry point, parameters."""

    def test_threads_run_everything_and_the_statistics_add_up(self) -> None:
        self.require_instances()

        async def scene() -> None:
            stage = Stage(self.scheduler_class, self.model_config(), 2, self.most_rows)
            await stage.start_threads()
            for number in range(60):
                (ticket,) = self.send(stage, rows=1 + number % 2)
                if number % 7 == 0:
                    ticket.cancel()
                if number % 10 == 0:
                    await stage.settle()
            await stage.end_threads()
            assert all(len(told) == 1 for told in stage.answers.values()), "not everybody is answered once"
            stage.check()
            _add_up(stage)

        play(scene)

    def test_a_server_finds_and_serves_it(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        repository = tmp_path_factory.mktemp("repository")
        write_model(repository, self.model_config())
        for other in self.others:
            write_model(repository, f'name: "{other}" {OTHER}')
        with serve(repository, strict_readiness=False, exit_on_error=False) as server:
            names = server.plugins.schedulers.names()
            assert self.scheduler in names, (
                f"no installed distribution brings scheduler '{self.scheduler}', only {', '.join(names)}; add an entry "
                f'point of the group headrace: {self.scheduler} = "{self.plugin}"'
            )
            (entry,) = [each for each in server.index() if each.name == NAME]
            assert entry.state == "READY", f"a model that chooses it does not load: {entry.reason}"
            x = np.ones((min(2, self.most_rows or 2), 1), np.float32)
            outputs = server.infer(NAME, {"x": x}, **self.fields(0)).outputs
            np.testing.assert_array_equal(np.asarray(outputs["y"]), x)

    def test_its_metrics_can_be_read_at_any_time(self) -> None:
        if not self.declared.metrics:
            self.not_claimed("it declares no metrics")

        async def scene() -> None:
            stage = self.stage(2)
            seen: dict[str, float] = {}
            for number in range(24):
                _read(stage, seen)
                (ticket,) = self.send(stage, rows=1 + number % 2)
                if number % 7 == 0:
                    ticket.cancel()
                await stage.settle()
            _read(stage, seen)
            await stage.run(self.patience_ns)
            _read(stage, seen)
            await stage.turn(MINUTE)
            _read(stage, seen)
            stage.model_queue.close()
            _read(stage, seen)

        play(scene)

    def test_an_unknown_parameter_is_named_with_the_known(self) -> None:
        if self.scheduler_class.Parameters is Scheduler.Parameters:
            self.not_claimed("the scheduler declares no Parameters, so it knows none")
        config = self.model_config()
        config.parameters["scheduler.no_such_parameter"].string_value = "1"

        async def scene() -> None:
            error = error_of(partial(Stage, self.scheduler_class, config, 0))
            assert isinstance(error, ConfigError), "nothing is said of the parameter 'no_such_parameter'"
            assert "no_such_parameter" in error.message, f"the parameter is not named: {error.message}"

        play(scene)

    def test_it_accepts_its_config_and_names_each_mistake(self) -> None:
        for completed in (False, True):
            found = self._problems(self.model_config(), completed)
            assert not found, f"the config of the kit is refused: {found[0]}"
        if not self.mistakes:
            self.not_claimed("it lists no mistakes, so what it refuses in a config is not checked")
        for text, field in self.mistakes.items():
            wrong = self.model_config()
            text_format.Merge(text, wrong)
            self._problems(wrong, completed=False)
            found = self._problems(wrong, completed=True)
            fields = [problem.field for problem in found]
            assert field in fields, f"a problem of {field} is expected for {text!r}, and there are {fields}"

    def _problems(self, config: ModelConfig, completed: bool) -> list[Problem]:
        before = config.SerializeToString(deterministic=True)
        found = list(self.declared.check_config(config, completed=completed))
        assert config.SerializeToString(deterministic=True) == before, "check_config has changed the config"
        for problem in found:
            assert isinstance(problem, Problem), f"check_config has yielded {problem!r}, which is no Problem"
            assert problem.field, f"the problem '{problem.message}' has no field"
            assert problem.message, f"the problem of {problem.field} has no message"
        return found


def _read(stage: Stage, seen: dict[str, float]) -> None:
    """Read the metrics as the server does. Fail if a counter is less than in ``seen``."""
    try:
        read = measured(stage.model_queue.full_scheduler)
    except BaseException as error:
        raise AssertionError(f"its metrics cannot be read: {error!r}") from error
    for metric, value in read:
        if metric.kind == "counter":
            before = seen.get(metric.name, 0.0)
            assert value >= before, f"counter '{metric.name}' went from {before:g} to {value:g}"
        seen[metric.name] = value


def _add_up(stage: Stage) -> None:
    numbers = stage.statistics.snapshot()
    gone = [ticket for ticket in stage.tickets if isinstance(stage.told(ticket)[0], Cancelled)]
    rows = sum(stage.rows[ticket.request.id] for ticket in stage.tickets if ticket not in gone)
    for what, counted, right in (
        ("answers", numbers.success.count, len(stage.tickets) - len(gone)),
        ("rows", numbers.executions.inference_count, rows),
        ("cancelled requests", numbers.cancelled.count, len(gone)),
        ("waiting requests", stage.model_queue.pending, 0),
    ):
        assert counted == right, f"{counted} {what} are counted, and there were {right}"
