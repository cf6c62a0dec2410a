"""The statistics that one batch adds."""

from __future__ import annotations

import numpy as np

from headrace.backends.base import Instance, Tensors
from headrace.executors.instance import ExecutionRecorder, run_batch, runner_for
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import LATER
from headrace.messages import dtypes
from headrace.messages.spec import Spec
from headrace.telemetry.statistics import ModelStatistics
from tests.core.conftest import make_ticket


class Picky(Instance):
    """Refuses negative rows."""

    def execute(self, inputs: Tensors) -> Tensors:
        if (np.asarray(inputs["x"]) < 0).any():
            raise ValueError("negative")
        return {"y": inputs["x"]}


def test_a_request_of_a_disconnected_client_is_counted_as_cancelled_and_not_as_failed() -> None:
    runner = runner_for(Picky(), OutputSchema("m", "1", {"y": Spec("y", dtypes.FP32, (1,))}, True))
    statistics = ModelStatistics()
    recorder = ExecutionRecorder("m_0", statistics.for_instance)
    batch = [make_ticket("m", {"x": np.full((1, 1), x, np.float32)}, _unheard) for x in (1, 2, -1, -1)]
    batch[1].cancel()
    batch[3].cancel()
    returned, times = run_batch(runner, batch)
    answers = [answer for answer in returned if answer is not LATER]
    recorder.batch(batch, batch, answers, times)
    counted = statistics.snapshot()
    assert (counted.success.count, counted.cancelled.count, counted.backend_failures.count) == (1, 2, 1)
    assert counted.cancelled.ns > 0
    assert counted.fail.count == 3
    assert statistics.cancelled.count == 0  # the requests that stayed in the queue


def _unheard(answer: object, final: bool) -> None:
    """An observer that does nothing."""
