"""A model chooses its scheduler by a parameter, also one that the config has no field for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from headrace import HeadraceError, InstanceInfo, Scheduler, Server, Ticket, Wait
from headrace.registry import PluginInfo
from tests.core.conftest import inspect

CONFIG = """
    backend: "identity" max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
RECEIVED: list[int] = []


@dataclass(frozen=True, slots=True)
class Parameters:
    most: int = 1


class Several(Scheduler):
    name = "several"
    Parameters = Parameters

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket] | Wait:
        RECEIVED.append(self.context.parameters.most)
        return self.context.waiting.head(self.context.parameters.most)


def served(repository: Path, extra: str) -> Server:
    (repository / "m" / "1").mkdir(parents=True)
    (repository / "m" / "config.pbtxt").write_text(CONFIG + extra)
    server = Server(repository, strict_readiness=False, exit_on_error=False)
    server.plugins.schedulers.add(Several, PluginInfo("several", "headrace-several", "1"))
    return server


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def test_a_scheduler_is_chosen_by_name_and_gets_its_parameters(tmp_path: Path) -> None:
    RECEIVED.clear()
    extra = parameter("scheduler", "several") + parameter("scheduler.most", "3")
    with served(tmp_path, extra) as server:
        answer = server.infer("m", {"x": np.ones((1, 1), np.float32)})
    assert answer.outputs
    assert set(RECEIVED) == {3}


CHOSEN = parameter("scheduler", "several")


@pytest.mark.parametrize(
    ("extra", "because"),
    [
        (parameter("scheduler", "severl"), "no plugin provides scheduler 'severl'; did you mean 'several'?"),
        (
            parameter("scheduler", "several") + parameter("scheduler.mist", "3"),
            "unknown parameter 'mist'; did you mean",
        ),
        (
            parameter("scheduler", "several") + parameter("scheduler.most", "x"),
            "'most' is 'x', expected a whole number",
        ),
    ],
)
def test_a_choice_that_cannot_be_served_is_refused_with_the_reason(tmp_path: Path, extra: str, because: str) -> None:
    with served(tmp_path, extra) as server:
        with pytest.raises(HeadraceError):
            server.infer("m", {"x": np.ones((1, 1), np.float32)})
        assert because in server.index()[0].reason


@pytest.mark.parametrize("has_engines", [True, False])
def test_an_inspection_names_a_scheduler_that_is_not_there(tmp_path: Path, has_engines: bool) -> None:
    served(tmp_path, parameter("scheduler", "dynamic_batchin"))
    (problem,) = inspect(tmp_path, has_engines=has_engines)
    assert "no plugin provides scheduler 'dynamic_batchin'; did you mean 'dynamic_batching'?" in problem
    assert not problem.startswith("0: "), "it has a line"
