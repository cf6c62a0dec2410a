"""Checks of answers: they are right, do not change later, and do not depend on the protocol."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from headrace import (
    BytesTensor,
    Instance,
    RequestInstance,
    StackedTensors,
    Tensor,
    data_type,
    dtypes,
    on_host,
)
from headrace_testing.driving import Subject, outputs_of
from headrace_testing.example import NAME, Example, assert_same, bytes_of, copy_of, take_rows
from headrace_testing.played_tensors import PlayedDeviceTensor
from headrace_testing.serving import NOT_IN_JSON, WAYS, Way, infer

KINDS = (*(dtype.name for dtype in dtypes.ALL), "SCALAR")


class Answers(Subject):
    """One request at a time."""

    def test_answers_equal_the_examples(self, example: Example, tmp_path_factory: pytest.TempPathFactory) -> None:
        with self.serving(example, tmp_path_factory.mktemp("repository")) as server:
            found = infer(server, NAME, example.given)
        assert_same(found, example.expected, example.tolerance, "the example")

    def test_each_row_alone_equals_the_row_in_the_batch(self, example: Example) -> None:
        self.require_batching(example)
        given = example.given
        with self.driver(example).loaded() as instance:
            whole = instance.infer(given)
            for row in range(example.rows):
                alone = instance.infer(take_rows(given, row, row + 1))
                expected = take_rows(whole, row, row + 1)
                assert_same(alone, expected, example.tolerance, f"row {row} alone")

    def test_zero_rows_give_zero_rows(self, example: Example) -> None:
        self.require_batching(example)
        if not self.zero_rows:
            self.not_claimed("zero rows are not claimed")
        with self.driver(example).loaded() as instance:
            try:
                found = instance.infer(take_rows(example.given, 0, 0))
            except Exception as error:
                raise AssertionError(
                    f"a batch without rows is refused: {error}\nIf the engine takes no empty batch, write "
                    f"`zero_rows = False` in {type(self).__name__}"
                ) from error
        assert_same(found, take_rows(example.expected, 0, 0), example.tolerance, "zero rows")

    def test_an_answer_is_unchanged_by_the_next_call(self, example: Example) -> None:
        given = example.given
        with self.driver(example).loaded() as instance:
            answer = instance.infer(given)
            copies = {name: copy_of(tensor) for name, tensor in answer.items()}
            instance.infer(_others(given))
            assert_same(answer, copies, 0.0, "an answer after the next call")
        assert_same(answer, copies, 0.0, "an answer after close")

    def test_inputs_are_not_written_to(self, example: Example) -> None:
        given = {name: copy_of(tensor) for name, tensor in example.given.items()}
        copies = {name: bytes_of(tensor) for name, tensor in given.items()}
        with self.driver(example).loaded() as instance:
            instance.infer(given)
        for name, tensor in given.items():
            assert bytes_of(tensor) == copies[name], f"the backend wrote to input '{name}'"

    def test_inputs_may_be_views_on_a_received_buffer(self, example: Example) -> None:
        views = {name: _unaligned(tensor) for name, tensor in example.given.items()}
        with self.driver(example).loaded() as instance:
            found = instance.infer(views)
        assert_same(found, example.expected, example.tolerance, "read-only, unaligned inputs")

    def test_runs_on_a_thread_other_than_the_loaders(self, example: Example) -> None:
        if self.thread_bound:
            self.not_claimed("instances are bound to the thread that loaded them")
        with self.driver(example).loaded() as instance, ThreadPoolExecutor(1) as other:
            ticket = instance.ticket(example.given)
            found = outputs_of(other.submit(instance.run, [ticket]).result()[0])
        assert_same(found, example.expected, example.tolerance, "run on another thread")

    def test_runs_alternately_on_the_loop_and_on_its_thread(self, example: Example) -> None:
        with self.driver(example).loaded() as instance:
            if not instance.instance.any_thread:
                self.not_claimed("any_thread is not claimed")

            async def on_loop() -> dict[str, Tensor]:
                return outputs_of(instance.run([instance.ticket(example.given)])[0])

            for turn in range(3):
                found = asyncio.run(on_loop())
                assert_same(found, example.expected, example.tolerance, f"turn {turn} on an event loop")
                found = instance.infer(example.given)
                assert_same(found, example.expected, example.tolerance, f"turn {turn} on its own thread")

    def test_concurrent_calls_do_not_mix(self, example: Example) -> None:
        with self.driver(example).loaded() as instance:
            tested = instance.instance
            if not isinstance(tested, Instance | RequestInstance) or tested.concurrency == 1:
                self.not_claimed("several calls at once are not claimed (concurrency)")
            self.require_batching(example)

            def call(row: int) -> None:
                ticket = instance.ticket(take_rows(example.given, row, row + 1))
                found, expected = outputs_of(instance.run([ticket])[0]), take_rows(example.expected, row, row + 1)
                assert_same(found, expected, example.tolerance, f"row {row}, in concurrent calls")

            with ThreadPoolExecutor(tested.concurrency) as threads:
                list(threads.map(call, [number % example.rows for number in range(20 * tested.concurrency)]))

    def test_tensors_on_a_device_are_read_like_arrays(self, example: Example) -> None:
        with self.driver(example).loaded() as instance:
            tested = instance.instance
            if not isinstance(tested, Instance) or not tested.takes_device_tensors:
                self.not_claimed("tensors on a device are not claimed (takes_device_tensors)")
            assert_same(instance.infer(_on_device(example.given)), example.expected, example.tolerance, "on a device")
            self.require_batching(example)
            whole: dict[str, Any] = dict(instance.ticket(example.given).request.inputs)
            expected = instance.on_its_thread(partial(tested.execute, whole))
            pairs: Any = ((_on_device, _on_device), (_on_device, dict), (dict, dict))
            for places in pairs:
                parts = [
                    instance.ticket(place(take_rows(example.given, *ends))).request.inputs
                    for place, ends in zip(places, ((0, 1), (1, example.rows)), strict=True)
                ]
                stacked: dict[str, Any] = {
                    name: x if isinstance(x, BytesTensor) else StackedTensors([each[name] for each in parts])  # type: ignore[misc]
                    for name, x in whole.items()
                }
                found = instance.on_its_thread(partial(tested.execute, stacked))
                for name, value in expected.items():
                    assert_same(
                        {name: on_host(found[name])}, {name: on_host(value)}, example.tolerance, "StackedTensors"
                    )

    def test_two_instances_agree(self, example: Example) -> None:
        driver = self.driver(example)
        with driver.shared() as model, driver.instance(model, 0) as first, driver.instance(model, 1) as second:
            one = first.infer(example.given)
            assert_same(second.infer(example.given), one, 0.0, "the second instance")
            assert_same(first.infer(example.given), one, 0.0, "the first instance, after the second ran")

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_claimed_type_is_served(self, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        if kind != "SCALAR" and dtypes.BY_NAME[kind] not in self.backend_class.dtypes:
            self.not_claimed(f"{kind} is not claimed")
        example = self.example_of(kind, tmp_path_factory.mktemp(kind.lower()))
        if example is None:
            self.not_claimed(f"{kind} is claimed but never exercised: example_of returns no example")
        with self.serving(example, tmp_path_factory.mktemp("repository")) as server:
            found = infer(server, NAME, example.given)
        assert_same(found, example.expected, example.tolerance, kind)

    @pytest.mark.parametrize("over", WAYS)
    def test_the_answer_is_the_same_over(
        self, over: Way, example: Example, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        tensors = [*example.given.values(), *example.expected.values()]
        if over == "http-json" and any(data_type(tensor) in NOT_IN_JSON for tensor in tensors):
            self.not_claimed("JSON does not carry FP16 and BF16")
        repository = tmp_path_factory.mktemp("repository")
        with self.serving(example, repository, listen=over != "python") as server:
            found = infer(server, NAME, example.given, over)
        assert_same(found, example.expected, example.tolerance, f"over {over}")


def _others(given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs of the same shapes with other elements: in reverse order, or zeros if the reverse is equal."""
    return {name: _reversed(tensor) for name, tensor in given.items()}


def _on_device(given: dict[str, Tensor]) -> dict[str, Any]:
    """Return ``given`` on a simulated device. Strings stay on the host."""
    return {name: x if isinstance(x, BytesTensor) else PlayedDeviceTensor(x) for name, x in given.items()}


def _reversed(tensor: Tensor) -> Tensor:
    if isinstance(tensor, BytesTensor):
        return BytesTensor.from_items(tensor.items()[::-1], tensor.shape)
    other = np.ascontiguousarray(tensor.reshape(-1)[::-1].reshape(tensor.shape))
    return np.zeros_like(tensor) if np.array_equal(other, tensor) else other


def _unaligned(tensor: Tensor) -> Tensor:
    raw = memoryview(b"\0" + bytes_of(tensor))[1:]
    if isinstance(tensor, BytesTensor):
        return BytesTensor(raw, tensor.shape)
    return np.frombuffer(raw, np.uint8).view(tensor.dtype).reshape(tensor.shape)
