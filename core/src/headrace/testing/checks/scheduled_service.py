"""The scheduler on threads, and in a server that finds it."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.backends.base import NoParameters
from headrace.config.model_config_pb2 import ModelParameter
from headrace.config.parameters import unknown
from headrace.errors import Cancelled
from headrace.testing.checks.scheduled_subject import ScheduledSubject
from headrace.testing.example import NAME, write_model
from headrace.testing.serving import serve
from headrace.testing.stage import Stage, play


_OTHER = """backend: "identity" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }"""


class ScheduledService(ScheduledSubject):
    """Statistics, the entry point, parameters."""

    def test_threads_run_everything_and_the_statistics_add_up(self) -> None:
        self.require_instances()

        async def scene() -> None:
            stage = Stage(self.scheduler_class, self.model_config(), 2)
            threads = await stage.start_threads()
            for number in range(60):
                (ticket,) = self.send(stage, rows=1 + number % 2)
                if number % 7 == 0:
                    ticket.cancel()
                if number % 10 == 0:
                    await stage.settle()
            await stage.end_threads(threads)
            assert all(len(told) == 1 for told in stage.answers.values()), "not everybody is answered once"
            stage.check()
            _add_up(stage)

        play(scene)

    def test_a_server_finds_and_serves_it(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        repository = tmp_path_factory.mktemp("repository")
        write_model(repository, self.model_config())
        for other in self.others:
            write_model(repository, f'name: "{other}" {_OTHER}')
        with serve(repository, strict_readiness=False, exit_on_error=False) as server:
            names = server.plugins.schedulers.names()
            assert self.scheduler in names, (
                f"no installed distribution brings scheduler '{self.scheduler}', only {', '.join(names)}; add an entry "
                f'point of the group headrace: {self.scheduler} = "{self.plugin}"'
            )
            (entry,) = [each for each in server.index() if each.name == NAME]
            assert entry.state == "READY", f"a model that chooses it does not load: {entry.reason}"
            x = np.ones((2, 1), np.float32)
            np.testing.assert_array_equal(np.asarray(server.infer(NAME, {"x": x}).outputs["y"]), x)

    def test_an_unknown_parameter_is_named_with_the_known(self) -> None:
        kind = self.scheduler_class.Parameters
        if kind is NoParameters:
            self.not_claimed("the scheduler declares no Parameters, so it knows none")
        problems = unknown(kind, {"no_such_parameter": ModelParameter(string_value="1")})
        assert problems, "nothing is said of the parameter 'no_such_parameter'"
        assert "no_such_parameter" in problems[0].message, f"the parameter is not named: {problems[0].message}"


def _add_up(stage: Stage) -> None:
    numbers = stage.statistics.snapshot()
    gone = [ticket for ticket in stage.tickets if isinstance(stage.told(ticket)[0], Cancelled)]
    rows = sum(stage.rows[ticket.request.id] for ticket in stage.tickets if ticket not in gone)
    for what, counted, right in (
        ("answers", numbers.success.count, len(stage.tickets) - len(gone)),
        ("rows", numbers.executions.inference_count, rows),
        ("cancelled requests", numbers.cancelled.count, len(gone)),
        ("waiting requests", stage.kernel.pending, 0),
    ):
        assert counted == right, f"{counted} {what} are counted, and there were {right}"
