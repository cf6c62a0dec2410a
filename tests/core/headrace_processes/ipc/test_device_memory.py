"""Device memory between two processes, which two drivers over the same files play in one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import BackendError
from headrace_engines import AddressedTensor, CudaError
from headrace_processes.ipc.device_memory import PLACE, SEGMENT_BYTES, ReceivedDeviceMemory, SentDeviceMemory
from headrace_processes.ipc.framing import FrameParser, Kind, read_integers
from headrace_processes.ipc.reclaimer import RECLAIMER
from tests.core.headrace_processes.played_cuda import UUID, PlayedCuda, on_gpu


class Pair:
    """The two sides; what one sends, the other receives at once. ``lost`` messages arrive nowhere."""

    def __init__(self, folder: Path, gpus: Any = (UUID,)) -> None:
        self.here, self.there = PlayedCuda(folder), PlayedCuda(folder)
        self.sent = SentDeviceMemory(self.here, gpus, self._to_receiver)
        self.received = ReceivedDeviceMemory(lambda: self.there, "m_0_0", self._to_sender)

    def pass_on(self, array: Any) -> AddressedTensor:
        staged = self.sent.stage(on_gpu(array, self.here))
        assert staged is not None
        staged.is_sent = True
        place = PLACE.unpack(staged.place)
        return self.received.tensor(place, staged.offset, staged.nbytes, staged.shape, staged.dtype)

    def used(self) -> int:
        """Return the blocks in use."""
        with self.sent._lock:
            self.sent._collect()
            return sum(len(each.blocks._taken) for each in self.sent._segments.values())

    def _to_receiver(self, message: bytes) -> None:
        for frame in FrameParser().feed(message):
            assert frame.kind == Kind.DEVICE_RETIRE
            self.received.retire(read_integers(frame))

    def _to_sender(self, message: bytes) -> None:
        for frame in FrameParser().feed(message):
            numbers = read_integers(frame)
            self.sent.free_blocks(numbers) if frame.kind == Kind.DEVICE_FREE else self.sent.closed(numbers)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.005)


def test_a_tensor_is_read_in_the_memory_of_its_sender(pair: Pair) -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    tensor = pair.pass_on(array)
    assert pair.there.done == []  # opened when it is used
    np.testing.assert_array_equal(tensor.to_host(), array)
    np.testing.assert_array_equal(tensor[1:].to_host(), array[1:])
    assert pair.here.done.count("DtoD") == pair.there.done.count("open") == 1


def test_a_block_is_free_when_the_device_has_done_the_work_of_its_last_reader(pair: Pair) -> None:
    tensor, other = pair.pass_on(np.zeros(100)), pair.pass_on(np.ones(100))
    capsule = tensor.__dlpack__()
    del tensor
    pair.there.done.clear()
    until(lambda: pair.used() == 2)
    del capsule
    until(lambda: pair.used() == 1)
    assert pair.there.done == ["wait"]
    np.testing.assert_array_equal(other.to_host(), np.ones(100))
    del other  # nothing but this library has read it: nothing to wait for
    until(lambda: pair.used() == 0)
    assert pair.there.done.count("wait") == 1


def test_a_block_waits_for_the_end_of_a_capture(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = CudaError("cuCtxSynchronize failed with CUresult 900")
    refused.code = 900
    tries = iter([refused, refused])

    def wait(cuda: PlayedCuda) -> None:
        for error in tries:
            raise error
        cuda.done.append("wait")

    monkeypatch.setattr(PlayedCuda, "wait", wait)
    pair.pass_on(np.zeros(9)).__dlpack__()
    until(lambda: pair.used() == 0)
    assert pair.there.done.count("wait") == 1
    assert next(tries, None) is None


def test_memory_that_is_not_sent_is_free(pair: Pair) -> None:
    staged = pair.sent.stage(on_gpu(np.zeros(9), pair.here))
    assert pair.used() == 1
    del staged
    assert pair.used() == 0


def test_segments_that_are_unused_are_closed_and_then_freed(pair: Pair) -> None:
    large = np.zeros(SEGMENT_BYTES + 1, np.uint8)
    tensors = [pair.pass_on(each) for each in (large[:10], large, large)]
    assert all(each.__dlpack__() for each in tensors)
    assert len(pair.here.own) == 3
    assert pair.sent.trim()
    assert pair.sent.trim()  # all are in use
    assert len(pair.there.mapped) == 3
    tensors.clear()
    until(lambda: pair.used() == 0)
    assert not pair.sent.trim()
    until(lambda: len(pair.here.own) == 1)  # one of the usual size is kept
    assert len(pair.there.mapped) == 1
    pair.pass_on(large[:10])
    assert len(pair.here.own) == 1


def test_the_end_of_the_receiver_frees_everything(pair: Pair) -> None:
    tensor = pair.pass_on(np.zeros(9))
    pair.sent.close()
    until(lambda: not pair.here.own)
    assert pair.sent.stage(on_gpu(np.zeros(9), pair.here)) is None
    del tensor


def test_tensors_stay_readable_after_the_end_of_the_sender(pair: Pair) -> None:
    tensor = pair.pass_on(np.arange(9))
    tensor.to_host()
    pair.received.close()
    assert len(pair.there.mapped) == 1
    del tensor
    until(lambda: not pair.there.mapped)
    assert pair.used() == 1  # it has received nothing more


@pytest.mark.parametrize("gpus", [(), ("ff" * 16,)])
def test_a_gpu_that_the_peer_does_not_find_is_not_used(tmp_path: Path, gpus: Any) -> None:
    pair = Pair(tmp_path, gpus)
    assert pair.sent.stage(on_gpu(np.zeros(9), pair.here)) is None


def test_without_memory_a_tensor_is_sent_through_the_host(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = on_gpu(np.zeros(9), pair.here)

    def refuse(*arguments: object) -> Any:
        raise CudaError("cuMemAlloc_v2 failed with CUresult 2")

    monkeypatch.setattr(PlayedCuda, "allocate", refuse)
    assert pair.sent.stage(tensor) is None
    monkeypatch.undo()
    monkeypatch.setattr(PlayedCuda, "export", refuse)
    before = set(pair.here.own)
    assert pair.sent.stage(tensor) is None
    assert pair.here.own == before


def test_a_failed_copy_holds_no_block(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> Any:
        raise CudaError("cuStreamSynchronize failed with CUresult 700")

    monkeypatch.setattr(PlayedCuda, "copy", refuse)
    assert pair.sent.stage(on_gpu(np.zeros(9), pair.here)) is None
    assert pair.used() == 0


def test_a_handle_that_cannot_be_opened_is_an_error_of_the_request(pair: Pair) -> None:
    tensor = pair.received.tensor((1, 100, bytes.fromhex(UUID), b"x" * 64), 0, 4, (4,), np.dtype(np.uint8))
    with pytest.raises(BackendError, match=r"^a tensor of 'm_0_0' on GPU 0 cannot be read: cuIpcOpenMemHandle"):
        tensor.to_host()


def test_invalid_places_are_refused(pair: Pair) -> None:
    staged = pair.sent.stage(on_gpu(np.zeros(8, np.uint8), pair.here))
    assert staged is not None
    number, size, uuid, handle = PLACE.unpack(staged.place)
    dtype = np.dtype(np.uint8)
    with pytest.raises(ValueError, match="are not in a segment"):
        pair.received.tensor((number, size, uuid, handle), size - 7, 8, (8,), dtype)
    with pytest.raises(ValueError, match="is not in list"):
        pair.received.tensor((9, size, bytes(16), handle), 0, 8, (8,), dtype)
    too_large = pair.received.tensor((10, 1 << 39, uuid, handle), 1 << 38, 8, (8,), dtype)
    with pytest.raises(BackendError, match="the allocation is smaller than its sender says"):
        too_large.to_host()
    pair.sent.free_blocks((1 << 40 | 5, 77 << 40))  # neither is a block
    assert pair.used() == 1


def test_idle_memory_is_trimmed_by_itself(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_processes.ipc.reclaimer.IDLE_S", 0.01)
    RECLAIMER.post(lambda: None)  # it now waits for that time
    large = pair.pass_on(np.zeros(SEGMENT_BYTES + 1, np.uint8))
    del large
    until(lambda: not pair.here.own)
