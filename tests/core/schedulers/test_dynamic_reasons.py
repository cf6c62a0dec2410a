"""Why the dynamic batcher let a batch run, each reason provoked, on a clock that the test turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf import text_format

from headrace.config.model_config_pb2 import ModelConfig
from headrace.messages.ticket import Batch, Ticket
from headrace.schedulers.base import InstanceInfo, Scheduler
from headrace.schedulers.dynamic import DirectScheduler, DynamicScheduler
from headrace.telemetry.batch_history import KEPT
from headrace_testing.simulator import SchedulerSimulator, run_scenario

MS = 1_000_000
DELAY = "max_queue_delay_microseconds: 5000"


def staged(text: str = "", kind: type[Scheduler] = DynamicScheduler, instances: int = 1) -> SchedulerSimulator:
    config = text_format.Parse(f'name: "m" max_batch_size: 8 dynamic_batching {{ {text} }}', ModelConfig())
    simulator = SchedulerSimulator(kind, config, instances)
    simulator.poll_instances()
    return simulator


def explained(simulator: SchedulerSimulator) -> dict[str, Any]:
    return simulator.model_queue.history.document(simulator.clock.now_ns())


def reasons(simulator: SchedulerSimulator) -> list[tuple[str, int]]:
    """Return the reason and the rows of every batch."""
    return [(batch["reason"], batch["rows"]) for batch in explained(simulator)["batches"]]


async def send(simulator: SchedulerSimulator, *rows: int, key: object = None, **fields: Any) -> list[Ticket]:
    tickets = [simulator.send(count, key, **fields) for count in rows]
    await simulator.settle()
    return tickets


def test_without_a_delay_an_idle_instance_takes_all_waiting_requests() -> None:
    async def run() -> None:
        simulator = staged()
        await send(simulator, 1, 2)
        assert reasons(simulator) == [("idle_instance", 3)]

    run_scenario(run)


@pytest.mark.parametrize("text", ["", DELAY])
@pytest.mark.parametrize(("rows", "ran"), [((8,), 8), ((3, 5), 8), ((5, 4), 5), ((1,) * 9, 8)])
def test_a_batch_that_nothing_more_fits_in_is_full(text: str, rows: Sequence[int], ran: int) -> None:
    async def run() -> None:
        simulator = staged(text)
        await send(simulator, *rows)
        assert reasons(simulator) == [("full", ran)]

    run_scenario(run)


@pytest.mark.parametrize(("rows", "ran"), [((2, 2), 4), ((2, 2, 1), 4), ((1, 3, 1), 4)])
def test_a_preferred_size_that_is_met_is_the_reason(rows: Sequence[int], ran: int) -> None:
    async def run() -> None:
        simulator = staged(f"preferred_batch_size: [4] {DELAY}")
        await send(simulator, *rows)
        assert reasons(simulator) == [("preferred_size", ran)]

    run_scenario(run)


def test_request_that_exceeds_the_largest_preferred_size_completes_the_batch_before_it() -> None:
    async def run() -> None:
        simulator = staged(f"preferred_batch_size: [4] {DELAY}")
        await send(simulator, 3, 3)
        assert reasons(simulator) == [("full", 3)]

    run_scenario(run)


def test_the_delay_is_the_reason_once_it_has_passed() -> None:
    async def run() -> None:
        simulator = staged(DELAY)
        await send(simulator, 1, 2)
        assert reasons(simulator) == []
        await simulator.advance(5 * MS)
        assert reasons(simulator) == [("delay", 3)]
        (batch,) = explained(simulator)["batches"]
        assert (batch["first_wait_us"], batch["last_wait_us"], batch["requests"]) == (5000, 5000, 2)

    run_scenario(run)


@pytest.mark.parametrize("text", ["", DELAY])
def test_a_request_of_another_shape_breaks_the_batch(text: str) -> None:
    async def run() -> None:
        simulator = staged(text)
        simulator.send(2, "short")
        await send(simulator, 1, key="long")
        assert reasons(simulator) == [("shape_break", 2)]

    run_scenario(run)


@pytest.mark.parametrize("action", ["", "timeout_action: DELAY"])
def test_a_deadline_is_the_reason_if_the_rest_is_complete_without_the_expired_request(action: str) -> None:
    policy = f"default_queue_policy {{ {action} default_timeout_microseconds: 60000000 allow_timeout_override: true }}"

    async def run() -> None:
        simulator = staged(f"preferred_batch_size: [2, 8] max_queue_delay_microseconds: 500000 {policy}")
        await send(simulator, 3, timeout_us=1000)
        await send(simulator, 1)
        await send(simulator, 1)
        assert reasons(simulator) == []
        await simulator.advance(1 * MS)
        assert reasons(simulator) == [("deadline", 2)]
        simulator.instances[0].finish()
        await send(simulator, 2)
        if not action:  # the deadline is no reason for the batches after it
            assert reasons(simulator)[1:] == [("preferred_size", 2)]

    run_scenario(run)


@pytest.mark.parametrize(("rows", "reason"), [(1, "idle_instance"), (4, "preferred_size"), (8, "full")])
def test_a_request_alone_has_a_reason_too(rows: int, reason: str) -> None:
    async def run() -> None:
        simulator = staged("preferred_batch_size: [ 4 ]")
        await send(simulator, rows)
        assert reasons(simulator) == [(reason, rows)]

    run_scenario(run)


def test_the_direct_scheduler_gives_an_idle_instance_each_request() -> None:
    async def run() -> None:
        simulator = staged(kind=DirectScheduler)
        await send(simulator, 8, 1)
        simulator.instances[0].finish()
        assert reasons(simulator) == [("idle_instance", 8), ("idle_instance", 1)]

    run_scenario(run)


def test_waits_and_the_depth_of_the_queue_are_those_of_the_moment() -> None:
    async def run() -> None:
        simulator = staged()
        await send(simulator, 1)
        await send(simulator, 4, 1)
        await simulator.advance(2 * MS)
        await send(simulator, 3, 2, 1)
        await simulator.advance(1 * MS)
        simulator.instances[0].finish()
        document = explained(simulator)
        first, second = document["batches"]
        assert first == {
            "age_us": 3000, "instance": simulator.instances[0].name, "reason": "idle_instance", "requests": 1,
            "rows": 1, "first_wait_us": 0, "last_wait_us": 0, "waiting": 0,
        }  # fmt: skip
        assert second == {**first, "age_us": 0, "reason": "full", "requests": 3, "rows": 8, "first_wait_us": 3000,
                          "last_wait_us": 1000, "waiting": 2}  # fmt: skip
        assert document["reasons"] == {"idle_instance": 1, "full": 1}
        assert document["sizes"] == [{"rows": 1, "batches": 1}, {"rows": 8, "batches": 1}]
        assert document["longest_wait_us"] == {"p50": 0, "p90": 3000, "p99": 3000, "p100": 3000}

    run_scenario(run)


def test_request_cancelled_before_the_batch_is_taken_does_not_count() -> None:
    async def run() -> None:
        simulator = staged(DELAY)
        tickets = await send(simulator, 1, 2, 3)
        tickets[1].cancel()
        await simulator.advance(5 * MS)
        assert reasons(simulator) == [("delay", 4)]

    run_scenario(run)


def test_the_number_of_stored_batches_is_bounded() -> None:
    async def run() -> None:
        simulator = staged(kind=DirectScheduler)
        for _ in range(KEPT + 3):
            simulator.send()
        await simulator.run(0)
        assert len(explained(simulator)["batches"]) == explained(simulator)["remembered"] == KEPT

    run_scenario(run)


class Patient(Scheduler):
    """Gives reasons in its own words, or none."""

    name = "patient"

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket]:
        waiting = self.context.waiting.head(3)
        if len(waiting) == 3:
            return Batch(waiting, reason=b"x" * 1000)  # type: ignore[arg-type]
        return Batch(waiting, reason="it was time") if len(waiting) == 2 else waiting


def test_a_scheduler_may_have_its_own_reasons_or_none() -> None:
    async def run() -> None:
        simulator = staged(kind=Patient)
        await send(simulator, 1, 3)
        simulator.instances[0].finish()
        await send(simulator, 2)
        assert reasons(simulator) == [("it was time", 4), ("idle_instance", 2)]
        simulator.instances[0].finish()
        await send(simulator, 1, 1, 1)
        (reason, rows) = reasons(simulator)[-1]
        assert (len(reason), rows, list(explained(simulator)["reasons"])[-1]) == (100, 3, reason)

    run_scenario(run)
