"""Compare the cost of a request of a sequence with one of the dynamic batcher: ``python benchmarks/sequences.py``.

64 sequences, or 64 callers, have one request each in every round. The whole way from the scheduler to the answer runs
in this one process, with a model that does nothing, on one thread, so that only CPU is measured: the minimum of many
alternating rounds. Needs ``headrace-sequence``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Iterator
from time import perf_counter_ns

import numpy as np
from google.protobuf import text_format

from headrace import Answer, Device, InferRequest, Instance, InstanceInfo, Spec, Tensors, Ticket, dtypes
from headrace.config.model_config_pb2 import ModelConfig
from headrace.executors.instance import ExecutionRecorder, run_batch, runner_for
from headrace.executors.output_schema import OutputSchema
from headrace.executors.threads import LoopWakeup
from headrace.plugins import Plugins
from headrace.schedulers.base import ScheduledModel
from headrace.schedulers.model_queue import ModelQueue
from headrace.telemetry.statistics import ModelStatistics

CALLERS = 64
_CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } }
"""
_STATE = 'state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: 16 }'
CONFIGS = {
    "dynamic": "dynamic_batching { }",
    "direct": "sequence_batching { direct { } }",
    "oldest": "sequence_batching { oldest { } }",
    "direct, START and READY": f"sequence_batching {{ direct {{ }} {_CONTROLS} }}",
    "direct, state": f"sequence_batching {{ direct {{ }} {_STATE} }}",
}
_X, _Y = (Spec(name, dtypes.FP32, (16,)) for name in "xy")


class Nothing(Instance):
    """``y`` is ``x``, and a state is its own successor."""

    def execute(self, inputs: Tensors) -> Tensors:
        return {"y": inputs["x"], "t": inputs["s"]} if "s" in inputs else {"y": inputs["x"]}


class Bench:
    """A model queue and its one instance."""

    def __init__(self, name: str) -> None:
        text = f'name: "m" backend: "identity" max_batch_size: {CALLERS} {CONFIGS[name]}'
        config = text_format.Parse(text, ModelConfig())
        config.sequence_batching.max_sequence_idle_microseconds = 60_000_000
        if name == "dynamic":
            config.ClearField("sequence_batching")
            config.dynamic_batching.preferred_batch_size.append(CALLERS)
        kind = Plugins.discover().schedulers.get(str(config.WhichOneof("scheduling_choice")))
        statistics = ModelStatistics()
        info = InstanceInfo("m_0", Device("cpu"), CALLERS)
        model = ScheduledModel(config, [info], {"x": _X}, {"y": _Y})
        self._model_queue = ModelQueue(kind, model, statistics, asyncio.get_running_loop())
        outputs = {"y": _Y, **self._model_queue.full_scheduler.kept}
        self._runner = runner_for(Nothing(), OutputSchema("m", "1", outputs, True))
        self._recorder = ExecutionRecorder("m_0", statistics.for_instance)
        (self._source,) = self._model_queue.sources
        self._wakeup = LoopWakeup(lambda: None)
        self._inputs = {"x": np.ones((1, 16), np.float32)}
        self._starts = True
        self.answered = 0

    def round(self) -> int:
        """Return the nanoseconds per request of a round with one request each."""
        tickets = [self._ticket(number) for number in range(1, CALLERS + 1)]
        self._starts = False
        source, submit = self._source, self._model_queue.submit
        begun = perf_counter_ns()
        for ticket in tickets:
            submit(ticket)
        while batch := source.poll(self._wakeup):
            answers, times = run_batch(self._runner, batch)
            self._recorder.batch(batch, batch, answers, times)  # type: ignore[arg-type]
            source.deliver(batch, answers)  # type: ignore[arg-type]
        return (perf_counter_ns() - begun) // CALLERS

    def _ticket(self, number: int) -> Ticket:
        return Ticket(InferRequest("m", self._inputs, sequence_id=number, sequence_start=self._starts), self._respond)

    def _respond(self, answer: Answer, final: bool) -> None:
        self.answered += 1


def measured(rounds: int) -> Iterator[tuple[str, int]]:
    """Return the minimum cost of a request under each config, in nanoseconds."""
    benches = {name: Bench(name) for name in CONFIGS}
    costs: dict[str, list[int]] = {name: [] for name in CONFIGS}
    gc.disable()
    for _ in range(rounds):
        for name, bench in benches.items():
            costs[name].append(bench.round())
        gc.collect(0)
    for name, bench in benches.items():
        if bench.answered != CALLERS * rounds:
            raise SystemExit(f"{name}: {bench.answered} answers to {CALLERS * rounds} requests")
        yield name, min(costs[name])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument(
        "--server-us", type=float, default=15.0, help="what a request costs the server outside the scheduler, in µs"
    )
    arguments = parser.parse_args()
    costs = dict(measured(arguments.rounds))
    base, outside = costs["dynamic"], 1000 * arguments.server_us
    for name, cost in costs.items():
        print(
            f"{name:24} {cost / 1000:6.2f} µs from scheduler to answer, {cost / base:5.2f} of dynamic; "
            f"with {arguments.server_us:g} µs for the protocol {(cost + outside) / (base + outside):5.2f}"
        )


if __name__ == "__main__":
    asyncio.run(main())
