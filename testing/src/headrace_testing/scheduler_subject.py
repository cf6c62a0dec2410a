"""The scheduler under test: its claims, and checks of its service in a server and on threads."""

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
    Unavailable,
    dtypes,
)
from headrace_testing.driving import assert_installed, error_of, part_of
from headrace_testing.example import NAME, write_model
from headrace_testing.metrics import measured
from headrace_testing.plugin import NOT_RUN
from headrace_testing.serving import serve
from headrace_testing.simulator import OTHER, SchedulerSimulator, run_scenario

#: In ns.
US = 1000
MS = 1_000_000
MINUTE = 60_000 * MS


class ScheduledSubject:
    """The scheduler, its claims, and how it is simulated.

    ``plugin`` is the module of the entry point, ``scheduler`` the name in configs. ``config`` is more text for the
    model's config: ``scheduling_choice``, the scheduler's parameters. The claims:

    - ``max_batch``: the rows of one execution. ``most_rows``: the rows of one request, 0 for no limit.
    - ``delay_ns``: how long a single request waits for others while an instance is idle.
    - ``in_order``: equal requests run in the order of arrival.
    - ``longest_wait_ns``: the longest wait of a request while others keep arriving and each execution takes 10 ms. None
      for no promise.
    - ``timeout_us``: a timeout that requests may set, 0 for none. ``postpones``: an expired request
      waits behind all others instead of being rejected.
    - ``levels``: the number of priorities, 0 for none. Priority 1 runs first.
    - ``any_instance``: any idle instance gets the waiting requests.
    - ``mistakes``: text to add to the config that makes it wrong, each with the field at fault.
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

    def simulator(self, instances: int = 1) -> SchedulerSimulator:
        """Return a simulator with ``instances`` idle instances, or with none if the scheduler needs none."""
        count = instances if self.declared.needs_instances else 0
        simulator = SchedulerSimulator(self.scheduler_class, self.model_config(), count, self.most_rows)
        simulator.poll_instances()
        return simulator

    def send(self, simulator: SchedulerSimulator, count: int = 1, rows: int = 1, **fields: Any) -> list[Ticket]:
        number = len(simulator.tickets)
        return [simulator.send(rows, **{**self.fields(number + more), **fields}) for more in range(count)]

    async def busy(self, instances: int = 1) -> SchedulerSimulator:
        """Return a simulator whose instances are all busy, each with its own request."""
        self.require_instances()
        simulator = self.simulator(instances)
        for _ in simulator.instances:
            self.send(simulator)
            await simulator.advance(self.delay_ns)
        if not all(instance.batch for instance in simulator.instances):
            self.not_claimed(
                "it is not claimed that any idle instance gets waiting requests, so not all can be kept busy"
            )
        return simulator

    def require_instances(self) -> None:
        """Skip a check of instances if the scheduler needs none."""
        if not self.declared.needs_instances:
            self.not_claimed("it runs without instances, so checks of instances do not apply")

    def not_claimed(self, what: str) -> NoReturn:
        """Skip this check, with a line in the summary."""
        pytest.skip(f"{NOT_RUN}{self.scheduler}: {what}")


def assert_answered(simulator: SchedulerSimulator, ticket: Ticket) -> None:
    """Fail unless ``ticket`` has its own answer, and no other."""
    answers = simulator.answers_to(ticket)
    assert len(answers) == 1, f"request '{ticket.request.id}' is answered {len(answers)} times"
    assert isinstance(answers[0], InferResponse), f"request '{ticket.request.id}' gets {answers[0]!r}"
    assert answers[0].id == ticket.request.id, f"request '{ticket.request.id}' gets the answer of '{answers[0].id}'"


def assert_unavailable(simulator: SchedulerSimulator, ticket: Ticket) -> None:
    """Fail unless the abandoned ``ticket`` has exactly one answer, `headrace.Unavailable`."""
    answers = simulator.answers_to(ticket)
    assert [type(answer) for answer in answers] == [Unavailable], (
        f"abandoned request '{ticket.request.id}' gets {answers}"
    )


class ScheduledService(ScheduledSubject):
    """Statistics, the entry point, metrics and parameters."""

    def test_threads_run_all_requests_and_the_statistics_add_up(self) -> None:
        self.require_instances()

        async def scenario() -> None:
            simulator = SchedulerSimulator(self.scheduler_class, self.model_config(), 2, self.most_rows)
            await simulator.start_threads()
            for number in range(60):
                (ticket,) = self.send(simulator, rows=1 + number % 2)
                if number % 7 == 0:
                    ticket.cancel()
                if number % 10 == 0:
                    await simulator.settle()
            await simulator.end_threads()
            assert all(len(answers) == 1 for answers in simulator.answers.values()), (
                "not every request is answered once"
            )
            simulator.check()
            _add_up(simulator)

        run_scenario(scenario)

    def test_a_server_finds_and_serves_it(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        repository = tmp_path_factory.mktemp("repository")
        write_model(repository, self.model_config())
        for other in self.others:
            write_model(repository, f'name: "{other}" {OTHER}')
        with serve(repository, strict_readiness=False, exit_on_error=False) as server:
            assert_installed("scheduler", self.scheduler, self.plugin, server.plugins.schedulers.names())
            (entry,) = [each for each in server.index() if each.name == NAME]
            assert entry.state == "READY", f"a model with this scheduler does not load: {entry.reason}"
            x = np.ones((min(2, self.most_rows or 2), 1), np.float32)
            outputs = server.infer(NAME, {"x": x}, **self.fields(0)).outputs
            np.testing.assert_array_equal(np.asarray(outputs["y"]), x)

    def test_metrics_can_be_read_at_any_time(self) -> None:
        if not self.declared.metrics:
            self.not_claimed("it declares no metrics")

        async def scenario() -> None:
            simulator = self.simulator(2)
            seen: dict[str, float] = {}
            for number in range(24):
                _read(simulator, seen)
                (ticket,) = self.send(simulator, rows=1 + number % 2)
                if number % 7 == 0:
                    ticket.cancel()
                await simulator.settle()
            _read(simulator, seen)
            await simulator.run(self.patience_ns)
            _read(simulator, seen)
            await simulator.advance(MINUTE)
            _read(simulator, seen)
            simulator.model_queue.close()
            _read(simulator, seen)

        run_scenario(scenario)

    def test_an_unknown_parameter_is_refused(self) -> None:
        if self.scheduler_class.Parameters is Scheduler.Parameters:
            self.not_claimed("the scheduler declares no Parameters")
        config = self.model_config()
        config.parameters["scheduler.no_such_parameter"].string_value = "1"

        async def scenario() -> None:
            error = error_of(partial(SchedulerSimulator, self.scheduler_class, config, 0))
            assert isinstance(error, ConfigError), "the parameter 'no_such_parameter' is accepted"
            assert "no_such_parameter" in error.message, f"the parameter is not named: {error.message}"

        run_scenario(scenario)

    def test_it_accepts_its_config_and_reports_each_mistake(self) -> None:
        for completed in (False, True):
            found = self._problems(self.model_config(), completed)
            assert not found, f"the config of the kit is refused: {found[0]}"
        if not self.mistakes:
            self.not_claimed("it lists no mistakes, so wrong configs are not checked")
        for text, field in self.mistakes.items():
            wrong = self.model_config()
            text_format.Merge(text, wrong)
            self._problems(wrong, completed=False)
            found = self._problems(wrong, completed=True)
            fields = [problem.field for problem in found]
            assert field in fields, f"{text!r} must give a problem of {field}; it gives {fields}"

    def _problems(self, config: ModelConfig, completed: bool) -> list[Problem]:
        before = config.SerializeToString(deterministic=True)
        found = list(self.declared.check_config(config, completed=completed))
        assert config.SerializeToString(deterministic=True) == before, "check_config has changed the config"
        for problem in found:
            assert isinstance(problem, Problem), f"check_config has yielded {problem!r}, which is no Problem"
            assert problem.field, f"the problem '{problem.message}' has no field"
            assert problem.message, f"the problem of {problem.field} has no message"
        return found


def _read(simulator: SchedulerSimulator, seen: dict[str, float]) -> None:
    """Read the metrics as the server does. Fail if a counter is less than in ``seen``."""
    try:
        read = measured(simulator.model_queue.full_scheduler)
    except BaseException as error:
        raise AssertionError(f"its metrics cannot be read: {error!r}") from error
    for metric, value in read:
        if metric.kind == "counter":
            before = seen.get(metric.name, 0.0)
            assert value >= before, f"counter '{metric.name}' went from {before:g} to {value:g}"
        seen[metric.name] = value


def _add_up(simulator: SchedulerSimulator) -> None:
    numbers = simulator.statistics.snapshot()
    cancelled = [ticket for ticket in simulator.tickets if isinstance(simulator.answers_to(ticket)[0], Cancelled)]
    rows = sum(simulator.rows[ticket.request.id] for ticket in simulator.tickets if ticket not in cancelled)
    for what, counted, right in (
        ("answers", numbers.success.count, len(simulator.tickets) - len(cancelled)),
        ("rows", numbers.executions.inference_count, rows),
        ("cancelled requests", numbers.cancelled.count, len(cancelled)),
        ("waiting requests", simulator.model_queue.pending, 0),
    ):
        assert counted == right, f"{counted} {what} are counted instead of {right}"
