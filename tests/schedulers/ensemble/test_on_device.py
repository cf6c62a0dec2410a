"""Tensors that stay on a device between steps: which the plan keeps there, for models that take them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import (
    Backend,
    DeviceTensor,
    HeadraceError,
    InferRequest,
    Instance,
    Model,
    Server,
    StackedTensors,
    Tensors,
    Ticket,
    builtins,
    hookimpl,
)
from headrace_testing.played_tensors import PlayedDeviceTensor
from headrace_testing.serving import on_loop, serve

from .conftest import Write, both, ensemble, identity, step

X = np.array([[1, 2], [3, 4]], np.float32)
#: Every copy from the device, and where each input of an execution was.
COPIES: list[tuple[int, ...]] = []
RECEIVED: list[tuple[str, str]] = []


class Played(Instance):
    """Adds 1 to its input on the device that the test plays."""

    takes_device_tensors = True

    def __init__(self, name: str, reads: str, writes: list[str]) -> None:
        self._name, self._reads, self._writes = name, reads, writes

    def execute(self, inputs: Tensors) -> Tensors:
        x: Any = inputs[self._reads]
        is_region = isinstance(x, DeviceTensor) and not isinstance(x, PlayedDeviceTensor)
        RECEIVED.append((self._name, "region" if is_region else type(x).__name__))
        parts = x.parts if isinstance(x, StackedTensors) else [x]
        x = np.concatenate([np.from_dlpack(part) for part in parts])
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
    RECEIVED.clear()
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
    assert RECEIVED == [("one", "ndarray"), ("two", "PlayedDeviceTensor"), ("three", "PlayedDeviceTensor")]
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
    assert RECEIVED[-1] == ("two", "StackedTensors")
    assert COPIES == [(4, 2)]


def test_a_step_for_arrays_gets_a_copy_and_other_steps_the_device_tensor(
    write: Write, run: Callable[..., Server]
) -> None:
    write("one", played())
    write("two", played())
    write("three", identity())
    steps = [step("one", "a=x", "b=t"), step("two", "a=t", "b=y"), step("three", "a=t", "b=z")]
    write("e", ensemble(steps, outputs="y z"))
    found = run().infer("e", {"x": X}).outputs
    np.testing.assert_array_equal(np.asarray(found["y"]), X + 2)
    np.testing.assert_array_equal(np.asarray(found["z"]), X + 1)
    assert RECEIVED == [("one", "ndarray"), ("two", "PlayedDeviceTensor")]
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
def test_a_model_whose_tensors_are_read_in_transit(what: str, write: Write, run: Callable[..., Server]) -> None:
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
    assert {kind for name, kind in RECEIVED if name == "two"} == {expected}


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


ONE = [step("one", "a=x", "b=y")]
#: Ensembles with all tensors in a CUDA region: their configs, what the driver copies for a request, and the inputs
#: of their models.
REGIONS: dict[str, tuple[str, list[str], list[tuple[str, str]]]] = {
    "chain": (
        ensemble(CHAIN),
        ["DtoD"],
        [("one", "region"), *[(n, "PlayedDeviceTensor") for n in ("two", "three")]],
    ),
    "nested": (
        ensemble([step("short", "x=x", "y=t"), step("one", "a=t", "b=y")]),
        ["DtoD"],
        [("one", "region"), ("one", "PlayedDeviceTensor")],
    ),
    "beside_the_host": (
        ensemble([*ONE, step("host", "a=z", "b=w")], inputs="x z", outputs="y w"),
        ["DtoD", "DtoH", "HtoD"],
        [("one", "region")],
    ),
    "with_the_host": (
        ensemble([*ONE, step("host", "a=x", "b=w")], outputs="y w"),
        ["DtoD", "DtoH", "HtoD"],
        [("one", "ndarray")],
    ),
    "from_the_host": (
        ensemble([step("host", "a=x", "b=t"), step("one", "a=t", "b=y")]),
        ["DtoD", "DtoH"],
        [("one", "ndarray")],
    ),
    "to_the_host": (
        ensemble([step("one", "a=x", "b=t"), step("host", "a=t", "b=y")]),
        ["HtoD"],
        [("one", "region")],
    ),
}


def test_cuda_regions_are_read_and_written_in_place(
    write: Write, run: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, cuda_memory = pytest.importorskip("tritonclient.http"), pytest.importorskip("headrace_shm.cuda_memory")
    from tests.extensions.shm.played_driver import PlayedDriver

    driver = PlayedDriver()
    monkeypatch.setattr(cuda_memory, "_driver", driver)
    for name, config in {**dict.fromkeys(("one", "two", "three"), played()), "host": identity()}.items():
        write(name, config)
    write("short", ensemble(ONE))
    for name, (config, _, _) in REGIONS.items():
        write(name, config)
    server = run(listen=True, allow_client_shm=True)
    with client.InferenceServerClient(f"127.0.0.1:{server.options.http_port}") as connection:
        connection.register_cuda_shared_memory("r", b"A" * 86 + b"==", 0, 8192)
        driver.memory[:16] = X.ravel().view(np.uint8)
        for name, (_, copies, received) in REGIONS.items():
            view = server.resolve(name)
            tensors = [client.InferInput(each, [2, 2], "FP32") for each in view.inputs]
            wanted = [client.InferRequestedOutput(each) for each in view.outputs]
            for number, each in enumerate(wanted):
                each.set_shared_memory("r", 16, offset=4096 + 16 * number)
            for each in tensors:
                each.set_shared_memory("r", 16)
            for _ in range(2):  # the second message is not parsed again
                for seen in (RECEIVED, driver.done, COPIES):
                    seen.clear()
                driver.memory[4096:] = 0
                connection.infer(name, tensors, outputs=wanted)
                steps = sum(name != "host" for name, _ in received)
                assert driver.memory[4096:4112].tobytes() == (X + steps).tobytes(), name
                assert (RECEIVED, sorted(set(driver.done))) == (received, copies), name
            assert ([(2, 2)] if name == "to_the_host" else []) == COPIES, name
            assert driver.done.count("DtoH") == ("DtoH" in copies)
        connection.unregister_cuda_shared_memory("r")


def test_a_network_caller_gets_arrays_for_tensors_in_regions(write: Write, run: Callable[..., Server]) -> None:
    """Plans for callers that take outputs on the device are not used for others."""
    write("one", played())
    write("e", ensemble(ONE))
    server = run()
    view = server.resolve("e").view
    assert (set(view.takes_device_tensors or ()), COPIES) == ({"x"}, [])

    async def ask(on_device: Mapping[str, bool] | None) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        inputs: dict[str, Any] = {"x": PlayedDeviceTensor(X, COPIES)}
        ticket = Ticket(InferRequest("e", inputs), lambda found, final: answer.set_result(found))
        if on_device is not None:
            ticket.on_device = on_device
        view.check(ticket)
        view.enqueue(ticket)
        return (await answer).outputs["y"]

    for on_device, kind, copies in (
        ({"y": False}, PlayedDeviceTensor, 0),
        (None, np.ndarray, 1),
        ({"y": True}, PlayedDeviceTensor, 1),
    ):
        COPIES.clear()
        found = on_loop(server, ask(on_device))
        assert (type(found), len(COPIES)) == (kind, copies)
        np.testing.assert_array_equal(found.to_host() if kind is PlayedDeviceTensor else found, X + 1)
