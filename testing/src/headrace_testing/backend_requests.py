"""Bad requests, failures, cancellation and deadlines: other requests must not be affected."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest

from headrace import (
    Answer,
    BytesTensor,
    InferRequest,
    InferResponse,
    InvalidArgument,
    Server,
    Tensor,
    Ticket,
    Unavailable,
)
from headrace_testing.driving import Subject, error_of, outputs_of
from headrace_testing.example import NAME, Example, assert_same, take_rows
from headrace_testing.serving import TIMEOUT_S, on_loop

Future: TypeAlias = "asyncio.Future[dict[str, Tensor]]"

#: Four waiting requests form a batch; after the delay also fewer, if one was cancelled.
_FOUR_AT_ONCE = "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 200000 }"
_DEADLINE = """dynamic_batching {
    preferred_batch_size: 4 max_queue_delay_microseconds: 500000
    default_queue_policy { timeout_action: REJECT default_timeout_microseconds: 1000 }
}"""


class Requests(Subject):
    """Errors and cancellations of one caller."""

    def test_a_wrong_shape_or_dtype_is_refused_before_execute(
        self, example: Example, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        with self.serving(example, tmp_path_factory.mktemp("repository")) as server:
            config = example.describe(self.backend, self.max_batch)
            fixed = {io.name for io in config.input if -1 not in io.dims}
            for what, inputs in _invalid_inputs(example.given, fixed):
                error = error_of(partial(server.infer, NAME, inputs))
                assert isinstance(error, InvalidArgument), f"{what} gives {error!r}, not an InvalidArgument"
            executions = server.resolve(NAME).snapshot().executions
        assert executions.execution_count == executions.fail.count == 0, "an invalid request has reached the backend"

    def test_after_an_exception_the_next_request_succeeds(self, example: Example) -> None:
        with self.driver(example).loaded() as instance:
            for name, inputs in [("no inputs", {}), *_without_each(example.given)]:
                incomplete = instance.ticket(inputs, check=False)
                answers = instance.on_its_thread(partial(instance.run, [incomplete]))
                assert len(answers) == 1, f"{name}: {len(answers)} answers to one request"
            found = instance.infer(example.given)
        assert_same(found, example.expected, example.tolerance, "after a failed execution")

    @pytest.mark.parametrize("position", range(3))
    def test_cancelling_a_waiting_request_leaves_the_others_answered(
        self, position: int, example: Example, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        self.require_batching(example)
        with self.serving(example, tmp_path_factory.mktemp("repository"), _FOUR_AT_ONCE) as server:
            on_loop(server, _cancel_waiting(server, example, position))

    @pytest.mark.parametrize("position", range(4))
    def test_cancelling_a_request_of_a_full_batch_leaves_the_others_answered(
        self, position: int, example: Example, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        self.require_batching(example)
        with self.serving(example, tmp_path_factory.mktemp("repository"), _FOUR_AT_ONCE) as server:
            on_loop(server, _cancel_running(server, example, position))

    @pytest.mark.parametrize("position", range(3))
    def test_a_request_cancelled_during_execution_leaves_the_others_answered(
        self, position: int, example: Example
    ) -> None:
        self.require_batching(example)
        with self.driver(example).loaded() as instance:
            rows = _rows(example, 3)
            tickets = [instance.ticket(inputs) for inputs, _ in rows]
            tickets[position].stop()
            answers = instance.on_its_thread(partial(instance.run, tickets))
        assert len(answers) == len(tickets), f"{len(answers)} answers to {len(tickets)} requests"
        for number, (answer, (_, expected)) in enumerate(zip(answers, rows, strict=True)):
            if number != position:
                assert_same(outputs_of(answer), expected, example.tolerance, f"request {number}")

    def test_a_passed_deadline_is_never_executed(
        self, example: Example, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        self.require_batching(example)
        with self.serving(example, tmp_path_factory.mktemp("repository"), _DEADLINE) as server:
            error = error_of(partial(server.infer, NAME, take_rows(example.given, 0, 1)))
            assert isinstance(error, Unavailable), f"a request past its deadline gets {error!r}, not Unavailable"
            assert server.resolve(NAME).snapshot().executions.execution_count == 0, "it was executed"


async def _cancel_waiting(server: Server, example: Example, position: int) -> None:
    """Send three requests, cancel one, and send two more, which fill the batch of four."""
    rows = _rows(example, 5)
    futures, tickets = _submit(server, rows[:3])
    tickets[position].cancel()
    futures += _submit(server, rows[3:])[0]
    await _answered(futures, rows, position, example.tolerance)


async def _cancel_running(server: Server, example: Example, position: int) -> None:
    """Send four requests, which form a batch, and cancel one of them."""
    rows = _rows(example, 4)
    futures, tickets = _submit(server, rows)
    tickets[position].cancel()
    await _answered(futures, rows, position, example.tolerance)


async def _answered(
    futures: Sequence[Future], rows: Sequence[tuple[Any, dict[str, Tensor]]], position: int, tolerance: float
) -> None:
    """Check that every request ends, and that all except the one at ``position`` get their own rows."""
    done = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), TIMEOUT_S / 2)
    for number, (found, (_, expected)) in enumerate(zip(done, rows, strict=True)):
        if number != position:
            assert not isinstance(found, BaseException), f"request {number} failed with the cancelled one: {found!r}"
            assert_same(found, expected, tolerance, f"request {number}")


def _submit(server: Server, rows: Sequence[tuple[dict[str, Tensor], Any]]) -> tuple[list[Future], list[Ticket]]:
    futures: list[Future] = [server.loop.create_future() for _ in rows]
    tickets = [
        Ticket(InferRequest(NAME, inputs), partial(_settle, future))
        for future, (inputs, _) in zip(futures, rows, strict=True)
    ]
    for ticket in tickets:
        server.submit(ticket)
    return futures, tickets


def _settle(future: Future, answer: Answer, final: bool) -> None:
    if isinstance(answer, InferResponse):
        future.set_result(dict(answer.outputs))
    else:
        future.set_exception(answer or AssertionError("a request ended without an answer"))


def _rows(example: Example, count: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Return ``count`` single rows of the example with their answers; repeat the example if it is short."""
    places = [number % example.rows for number in range(count)]
    given, expected = example.given, example.expected
    return [(take_rows(given, row, row + 1), take_rows(expected, row, row + 1)) for row in places]


def _invalid_inputs(given: dict[str, Tensor], fixed: set[str]) -> list[tuple[str, dict[str, Tensor]]]:
    """Return invalid inputs, each with one mistake. The inputs ``fixed`` have no variable dims."""
    invalid: list[tuple[str, dict[str, Tensor]]] = []
    for name, tensor in given.items():
        other: Tensor = np.zeros(tensor.shape, np.int8)
        if isinstance(tensor, np.ndarray) and tensor.dtype == np.int8:
            other = np.zeros(tensor.shape, np.float64)
        invalid.append((f"another data type for '{name}'", given | {name: other}))
        invalid.append((f"one dimension more for '{name}'", given | {name: tensor.reshape((*tensor.shape, 1))}))
        if name in fixed:
            invalid.append((f"a longer row of '{name}'", given | {name: _longer(tensor)}))
    return invalid


def _longer(tensor: Tensor) -> Tensor:
    shape = (*tensor.shape[:-1], tensor.shape[-1] + 1)
    if isinstance(tensor, BytesTensor):
        return BytesTensor.from_items([b""] * int(np.prod(shape)), shape)
    return np.zeros(shape, tensor.dtype)


def _without_each(given: dict[str, Tensor]) -> list[tuple[str, dict[str, Tensor]]]:
    if len(given) < 2:
        return []
    return [(f"without '{name}'", {key: value for key, value in given.items() if key != name}) for name in given]
