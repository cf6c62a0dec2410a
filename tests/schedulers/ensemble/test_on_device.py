"""Tensors that stay on a device between steps: which the plan keeps there, for models that take them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Backend, HeadraceError, Instance, Model, Server, StackedTensors, Tensors, builtins, hookimpl
from headrace_testing.played_tensors import PlayedDeviceTensor
from headrace_testing.serving import on_loop, serve

from .conftest import Write, both, ensemble, identity, step

X = np.array([[1, 2], [3, 4]], np.float32)
#: Every copy from the device, and where each input of an execution was.
COPIES: list[tuple[int, ...]] = []
GIVEN: list[tuple[str, str]] = []


class Played(Instance):
    """Adds 1 to its input on the device that the test plays."""

    takes_device_tensors = True

    def __init__(self, name: str, reads: str, writes: list[str]) -> None:
        self._name, self._reads, self._writes = name, reads, writes

    def execute(self, inputs: Tensors) -> Tensors:
        given: Any = inputs[self._reads]
        GIVEN.append((self._name, type(given).__name__))
        if isinstance(given, StackedTensors):
            given = np.concatenate([getattr(each, "memory", each) for each in given.parts])
        x = getattr(given, "memory", given)
        made: Mapping[str, Any] = {name: PlayedDeviceTensor(x + 1, COPIES) for name in self._writes}
        return made


class OnDevice(Backend):
    name = "on_device"

    def load(self, model: Model) -> Instance:
        return Played(model.name, model.config.input[0].name, [each.name for each in model.config.output])


@pytest.fixture
def run(headrace_repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    own = builtins.register_backends()
    monkeypatch.setattr(builtins, "register_backends", hookimpl(lambda: [*own, OnDevice]))
    COPIES.clear()
    GIVEN.clear()
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serve(headrace_repository, **options))


def played(inputs: str = "a", outputs: str = "b", batch: int = 8, more: str = "", **io: str) -> str:
    return f'backend: "on_device" max_batch_size: {batch} {both(inputs, outputs, **io)} {more}'


CHAIN = [step("one", "a=x", "b=t"), step("two", "a=t", "b=u"), step("three", "a=u", "b=y")]


def test_a_chain_copies_only_the_output(write: Write, run: Callable[..., Server]) -> None:
    for name in ("one", "two", "three"):
        write(name, played())
    write("e", ensemble(CHAIN))
    server = run()
    np.testing.assert_array_equal(np.asarray(server.infer("e", {"x": X}).outputs["y"]), X + 3)
    assert GIVEN == [("one", "ndarray"), ("two", "PlayedDeviceTensor"), ("three", "PlayedDeviceTensor")]
    assert COPIES == [(2, 2)]
    np.testing.assert_array_equal(np.asarray(server.infer("two", {"a": X}).outputs["b"]), X + 1)
    assert COPIES == [(2, 2)] * 2


def test_requests_of_a_batch_are_stacked_on_the_device(write: Write, run: Callable[..., Server]) -> None:
    write("one", played())
    write("two", played(more="dynamic_batching { max_queue_delay_microseconds: 200000 preferred_batch_size: 4 }"))
    write("e", ensemble([step("one", "a=x", "b=t"), step("two", "a=t", "b=y")]))
    server = run()

    async def ask() -> list[Any]:
        return await asyncio.gather(*(server.infer_async("e", {"x": X + number}) for number in range(2)))

    for number, answer in enumerate(on_loop(server, ask())):
        np.testing.assert_array_equal(np.asarray(answer.outputs["y"]), X + number + 2)
    assert GIVEN[-1] == ("two", "StackedTensors")
    assert COPIES == [(4, 2)]


def test_a_step_that_takes_arrays_gets_one_and_the_others_stay(write: Write, run: Callable[..., Server]) -> None:
    write("one", played())
    write("two", played())
    write("three", identity())
    steps = [step("one", "a=x", "b=t"), step("two", "a=t", "b=y"), step("three", "a=t", "b=z")]
    write("e", ensemble(steps, outputs="y z"))
    found = run().infer("e", {"x": X}).outputs
    np.testing.assert_array_equal(np.asarray(found["y"]), X + 2)
    np.testing.assert_array_equal(np.asarray(found["z"]), X + 1)
    assert GIVEN == [("one", "ndarray"), ("two", "PlayedDeviceTensor")]
    assert COPIES == [(2, 2)] * 2, "t once, for three, and y"


def test_a_tensor_that_is_an_output_too_is_copied_once(write: Write, run: Callable[..., Server]) -> None:
    write("one", played())
    write("two", played())
    write("e", ensemble([step("one", "a=x", "b=t"), step("two", "a=t", "b=y")], outputs="t y"))
    server = run()
    found = server.infer("e", {"x": X}).outputs
    assert {name: type(tensor) for name, tensor in found.items()} == {"t": np.ndarray, "y": np.ndarray}
    np.testing.assert_array_equal(np.asarray(found["t"]), X + 1)
    assert COPIES == [(2, 2)] * 2
    COPIES.clear()
    assert list(server.infer("e", {"x": X}, outputs=["y"]).outputs) == ["y"]
    assert COPIES == [(2, 2)]


@pytest.mark.parametrize("what", ["batch axis", "cache", "sequence"])
def test_a_model_whose_tensors_are_read_on_the_way(what: str, write: Write, run: Callable[..., Server]) -> None:
    """A batch axis is added on the device. A cache and a sequence get arrays."""
    more = {"cache": "response_cache { enable: true }", "sequence": "sequence_batching {}"}.get(what, "")
    write("one", played())
    write("two", played(batch=0, more=more) if what == "batch axis" else played(more=more))
    write("e", ensemble([step("one", "a=x", "b=t"), step("two", "a=t", "b=y")]))
    options: dict[str, Any] = {"cache_config": {"local": {"size": "1048576"}}} if what == "cache" else {}
    server = run(**options)
    sequence = {"sequence_id": 1, "sequence_start": True, "sequence_end": True} if what == "sequence" else {}
    for _ in range(2):
        found = server.infer("e", {"x": X[:1]}, **sequence).outputs["y"]
        np.testing.assert_array_equal(np.asarray(found), X[:1] + 2)
    expected = "PlayedDeviceTensor" if what == "batch axis" else "ndarray"
    assert {kind for name, kind in GIVEN if name == "two"} == {expected}


def test_a_condition_on_the_device_is_read_from_the_host(write: Write, run: Callable[..., Server]) -> None:
    numbers: Any = {"dims": "1", "datatype": "INT32"}
    write("one", played(**numbers))
    write("two", played(**numbers))
    more = 'parameters { key: "ensemble.when.two" value { string_value: "t" } }'
    write("e", ensemble([step("one", "a=x", "b=t"), step("two", "a=t", "b=y")], more=more, **numbers))
    server = run()
    assert np.asarray(server.infer("e", {"x": np.array([[1]], np.int32)}).outputs["y"]).tolist() == [[3]]
    assert COPIES == [(1, 1)] * 2, "t for the condition, and y"
    with pytest.raises(HeadraceError, match="its condition did not hold"):
        server.infer("e", {"x": np.array([[-1]], np.int32)})
