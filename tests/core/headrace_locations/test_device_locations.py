"""Tensors of requests on a device: for models that take them there. The location is a played one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace import DeviceTensor, InternalError, Spec, TensorLocation, dtypes
from headrace.messages.request import InferRequest
from headrace.messages.ticket import ticket_of
from headrace.off_loop import LARGE_BYTES, TooLargeForLoop
from headrace_locations.device_locations import DeviceLocations, DeviceTarget, on_device
from headrace_locations.tensor_locations import LocatedTensors, Target, TensorLocations
from headrace_testing.played_tensors import PlayedDeviceTensor

X = np.arange(4, dtype=np.float32)
SPEC = Spec("x", dtypes.FP32, (4,))


class Shelf(TensorLocation):
    """``in`` is on a device, all else in the memory of the host."""

    name = "shelf"

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(engine=None))
        self.memory, self.finished = bytearray(16), 0
        self.taken: list[DeviceTensor] = []

    def source(self, parameters: Any, tensor: Spec) -> Any:
        return X.data

    def target(self, parameters: Any, tensor: Spec) -> memoryview:
        return memoryview(self.memory)

    def device_source(self, parameters: Any, tensor: Spec) -> DeviceTensor | None:
        if parameters["shelf"] == "broken":
            raise RuntimeError("the shelf is broken")
        return PlayedDeviceTensor(X) if parameters["shelf"] == "in" else None

    def device_target(self, memory: memoryview) -> Callable[[DeviceTensor], bool] | None:
        return self.take

    def take(self, tensor: DeviceTensor) -> bool:
        if not isinstance(tensor, PlayedDeviceTensor):
            raise RuntimeError("the shelf is full")
        self.taken.append(tensor)
        return tensor.shape == (4,)

    def finish(self, memory: Any, written: int) -> None:
        self.finished += 1


class Other(DeviceTensor):
    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        raise AssertionError

    def copy_to_host(self) -> Any:
        raise AssertionError

    def view(self, rows: slice, shape: Any) -> Other:
        raise AssertionError


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def test_only_requests_to_a_model_that_takes_device_tensors_read_them(shelf: Shelf) -> None:
    plain = TensorLocations([shelf])
    device = on_device(plain)
    assert isinstance(device, DeviceLocations)
    for locations, place, kind, sources in (
        (plain, "in", np.ndarray, 1),
        (device, "in", PlayedDeviceTensor, 0),
        (device, "out", np.ndarray, 1),
    ):
        located = LocatedTensors({"x"})
        assert type(locations.read(shelf, {"shelf": place}, SPEC, located)) is kind
        assert (len(located.sources), len(located.inputs)) == (sources, 1)
        assert type(locations.target(shelf, {"shelf": place}, SPEC, located)) is (
            Target if locations is plain else DeviceTarget
        )
        ticket = ticket_of(located.request(InferRequest("m", {})), lambda answer, final: None)
        assert getattr(ticket, "on_device", None) == (None if locations is plain else {"x": False})


def test_an_input_that_the_model_takes_as_an_array_only_is_read_as_one(shelf: Shelf) -> None:
    located = LocatedTensors({"another"})
    read = DeviceLocations([shelf]).read(shelf, {"shelf": "in"}, SPEC, located)
    assert (type(read), len(located.sources)) == (np.ndarray, 1)


def test_locations_without_a_device_are_the_same_for_every_model() -> None:
    class Host(TensorLocation):
        name = "host"

    plain = TensorLocations([Host(SimpleNamespace(engine=None))])
    assert on_device(plain) is plain


def test_an_output_on_the_device_is_copied_by_its_location_and_not_on_the_event_loop(shelf: Shelf) -> None:
    target = DeviceLocations([shelf]).target(shelf, {"shelf": "out"}, SPEC, LocatedTensors())
    tensor = PlayedDeviceTensor(X)
    with pytest.raises(TooLargeForLoop):
        target.write("x", tensor, LARGE_BYTES)  # type: ignore[arg-type]
    assert shelf.taken == []
    target.write("x", tensor)  # type: ignore[arg-type]
    assert (shelf.taken, tensor.copies, shelf.finished) == ([tensor], [], 0)
    target.write("x", X[:2], LARGE_BYTES)
    assert (bytes(shelf.memory[:8]), shelf.finished) == (X[:2].tobytes(), 1)


def test_an_output_that_its_location_does_not_copy_is_written_as_an_array(shelf: Shelf) -> None:
    target = DeviceLocations([shelf]).target(shelf, {"shelf": "out"}, SPEC, LocatedTensors())
    tensor: Any = PlayedDeviceTensor(X.reshape(2, 2))
    target.write("x", tensor)
    assert (bytes(shelf.memory), tensor.copies, shelf.finished) == (X.tobytes(), [(2, 2)], 1)
    large: Any = PlayedDeviceTensor(np.zeros(5, np.float32))
    with pytest.raises(InternalError, match="should be at least 20 bytes"):
        target.write("x", large, LARGE_BYTES)
    assert large.copies == []


def test_a_location_that_fails_is_named_in_the_log_only(shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    locations = DeviceLocations([shelf])
    with pytest.raises(InternalError, match="its log has the reason"):
        locations.read(shelf, {"shelf": "broken"}, SPEC, LocatedTensors({"x"}))
    target = locations.target(shelf, {"shelf": "out"}, SPEC, LocatedTensors())
    with pytest.raises(InternalError, match="its log has the reason"):
        target.write("x", Other((4,), np.dtype(np.float32)))  # type: ignore[arg-type]
    assert "the shelf is broken" in caplog.text
    assert "the shelf is full" in caplog.text
