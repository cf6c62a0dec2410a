"""Memory of a GPU that two processes share: one copies tensors into it, the other reads them in place.

The side that sends has `SentDeviceMemory`: segments of plain device memory, each exported once by an IPC handle of
CUDA, in which blocks are allocated. A tensor is copied into a block, within the GPU, and the message has the handle and
the place. The side that receives has `ReceivedDeviceMemory`. It opens a segment when a tensor in it is first used, and
releases a block when the tensor is no longer used and the GPU has finished its work. So a sender never exports memory
of another library, which may be impossible, and a process never opens a handle of its own.

::

    sender                                                                receiver
    a tensor, with the segment's handle and the block's place      ->     opens the segment, once
                                              a block is free      <-     DEVICE_FREE
    DEVICE_RETIRE      a segment has been unused for a while       ->     closes it
    frees it                                                       <-     DEVICE_CLOSED

GPUs are identified by UUID, because each process may number them differently.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from struct import Struct
from time import sleep
from typing import Any, Final, NamedTuple

import numpy as np

from headrace.errors import BackendError
from headrace.messages.device_tensor import DeviceTensor
from headrace_engines import AddressedTensor, CudaError, CudaLibrary, address_of
from headrace_processes.ipc.arena import FreeList
from headrace_processes.ipc.framing import MAX_INTEGERS, Kind, integers_frame
from headrace_processes.ipc.reclaimer import RECLAIMER

log = logging.getLogger(__name__)

#: The bytes of a segment. A larger segment is a multiple of `_PAGE_BYTES`, the unit in which CUDA exports memory.
SEGMENT_BYTES: Final = 32 * 1024 * 1024
_PAGE_BYTES: Final = 2 * 1024 * 1024
#: Offsets of blocks are multiples of this, like addresses that CUDA allocates.
_ALIGNMENT: Final = 256
#: The number of a block has the number of its segment, and in these lowest bits its offset.
_OFFSET_BITS: Final = 40
_OFFSETS: Final = (1 << _OFFSET_BITS) - 1

#: Blocks are released after this delay, many at a time.
GATHER_S: Final = 0.01

#: A segment: its number, its size in bytes, the UUID of its device, and its handle.
PLACE: Final = Struct("<QQ16s64s")


class Place(NamedTuple):
    """The description of a segment, which is sent with each tensor in it."""

    number: int
    size: int
    device: bytes
    handle: bytes


class _Segment:
    """A segment of this side. ``is_used`` is True if a block was allocated since the last `SentDeviceMemory.trim`."""

    def __init__(self, device: int, address: int, place: Place) -> None:
        self.device, self.address = device, address
        self.number, self.size = place.number, place.size
        self.place = PLACE.pack(*place)
        self.blocks = FreeList(place.size)
        self.is_used = True


class StagedTensor:
    """A tensor in a block of this side. If it ``is_sent``, the block is freed when the peer releases it; otherwise when
    this object is freed. ``place`` is the packed description of the segment, and ``offset`` is the block in it."""

    __slots__ = ("_memory", "_number", "dtype", "is_sent", "nbytes", "offset", "place", "shape")

    def __init__(self, memory: SentDeviceMemory, segment: _Segment, offset: int, tensor: DeviceTensor) -> None:
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes
        self.place, self.offset = segment.place, offset
        self.is_sent = False
        self._memory, self._number = memory, segment.number << _OFFSET_BITS | offset

    def __del__(self) -> None:
        if not self.is_sent:
            self._memory.free_blocks((self._number,))


class SentDeviceMemory:
    """The device memory of this side, in which a peer reads tensors. ``devices`` are the UUIDs of the GPUs that the
    peer can use. ``send`` writes a frame to the peer, on any thread."""

    def __init__(self, library: CudaLibrary, devices: Collection[str], send: Callable[[bytes], None]) -> None:
        self._library, self._send = library, send
        self._known = [bytes.fromhex(uuid) if uuid in devices else b"" for uuid in library.devices()]
        self._lock = threading.Lock()
        self._segments: dict[int, _Segment] = {}
        #: Segments that the peer has yet to close.
        self._retired: dict[int, _Segment] = {}
        self._streams: dict[int, int] = {}
        #: The numbers of blocks that are free again.
        self._returned: deque[int] = deque()
        self._count = 0
        self._is_closed = False
        RECLAIMER.start()

    @property
    def nbytes(self) -> int:
        """The bytes of all segments."""
        return sum(each.size for each in (*self._segments.values(), *self._retired.values()))

    def stage(self, tensor: DeviceTensor) -> StagedTensor | None:
        """Wait until ``tensor`` is complete, and copy it into a block. Blocks; any thread.

        Return None if the peer cannot use its device: the tensor must then be sent as an array.
        """
        kind, device = tensor.__dlpack_device__()
        size = tensor.nbytes
        if kind != self._library.kind or not size or device >= len(self._known) or not self._known[device]:
            return None
        with self._lock:
            if self._is_closed:
                return None
            self._collect()
            try:
                with self._library.using(device):
                    return self._copy(tensor, device, size)
            except CudaError as error:
                log.warning("a tensor of %d bytes on GPU %d is sent through the host: %s", size, device, error)
                return None

    def free_blocks(self, numbers: Iterable[int]) -> None:
        """Free blocks. Numbers of no block in use are ignored. Any thread; safe in a finalizer."""
        self._returned.extend(numbers)

    def closed(self, numbers: Sequence[int]) -> None:
        """Free segments: the peer has closed them. Any thread."""
        RECLAIMER.post(partial(self._free, numbers))

    def close(self) -> None:
        """Free everything: the peer has ended. Any thread."""
        RECLAIMER.post(self._close)

    def trim(self) -> bool:
        """Retire all segments that were not used since the last call, except one of the usual size."""
        if not self._lock.acquire(blocking=False):  # a copy holds the lock until its tensor is complete
            return True
        try:
            self._collect()
            idle = [each for each in self._segments.values() if each.blocks.is_empty and not each.is_used]
            spare = next((each for each in idle if each.size == SEGMENT_BYTES), None)
            retired = [each for each in idle if each is not spare]
            for each in self._segments.values():
                each.is_used = False
            for each in retired:
                self._retired[each.number] = self._segments.pop(each.number)
            is_idle = self._is_closed or not [each for each in self._segments.values() if each is not spare]
        finally:
            self._lock.release()
        if retired and not self._is_closed:
            self._send(integers_frame(Kind.DEVICE_RETIRE, [each.number for each in retired]))
        return not is_idle

    def _copy(self, tensor: DeviceTensor, device: int, size: int) -> StagedTensor | None:
        library = self._library
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = library.new_stream()
        capsule = tensor.__dlpack__(stream=stream)  # referenced until the copy is done
        source = address_of(capsule)
        if source is None:
            return None
        library.use(device)  # again: a framework may have changed it
        segment, offset = self._reserve(device, size)
        try:
            library.copy(segment.address + offset, source, size, stream)
        except BaseException:
            segment.blocks.free(offset)
            raise
        return StagedTensor(self, segment, offset, tensor)

    def _reserve(self, device: int, size: int) -> tuple[_Segment, int]:
        """Return a segment, and the offset of a new block there. Raises `CudaError`."""
        block_bytes = -(-size // _ALIGNMENT) * _ALIGNMENT
        for segment in self._segments.values():
            if segment.device == device and (offset := segment.blocks.allocate(block_bytes)) is not None:
                segment.is_used = True
                return segment, offset
        nbytes = max(SEGMENT_BYTES, -(-block_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        address = self._library.allocate(nbytes)
        try:
            handle = self._library.export(address)
        except BaseException:
            self._library.free(address)
            raise
        self._count += 1
        segment = _Segment(device, address, Place(self._count, nbytes, self._known[device], handle))
        self._segments[segment.number] = segment
        RECLAIMER.watch(self)
        offset = segment.blocks.allocate(block_bytes)
        assert offset is not None
        return segment, offset

    def _collect(self) -> None:
        """Free the blocks in `_returned`. The caller holds the lock."""
        while self._returned:
            number = self._returned.popleft()
            segment = self._segments.get(number >> _OFFSET_BITS)
            if segment is not None:
                try:
                    segment.blocks.free(number & _OFFSETS)
                except ValueError:  # a broken peer harms only its own tensors
                    log.warning("no block of device memory begins at %d", number & _OFFSETS)

    def _free(self, numbers: Iterable[int]) -> None:
        with self._lock:
            for number in numbers:
                segment = self._retired.pop(number, None)
                if segment is not None:
                    with self._library.using(segment.device):
                        self._library.free(segment.address)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._retired.update(self._segments)
            self._segments.clear()
        self._free(tuple(self._retired))


class ReceivedDeviceMemory:
    """The device memory of a peer. ``name`` is the peer's name for errors. ``send`` writes a frame to it, on any
    thread."""

    def __init__(self, library: Callable[[], CudaLibrary], name: str, send: Callable[[bytes], None]) -> None:
        self._name, self._send = name, send
        self._get_library = library
        self._devices: list[str] = []
        self._segments: dict[int, _OpenSegment] = {}
        #: The blocks to release: the number, the segment, and True if another library may have read it.
        self._unused: deque[tuple[int, _OpenSegment, bool]] = deque()
        self._is_posted = self._is_closed = False
        RECLAIMER.start()

    def tensor(
        self, place: tuple[Any, ...], offset: int, nbytes: int, shape: Sequence[int], dtype: np.dtype[Any]
    ) -> AddressedTensor:
        """Return the tensor at ``offset`` of the segment ``place``, which is opened when the tensor is used.

        Raises `ValueError` if it is not in the segment, or on a device that this process cannot use.
        """
        number, size, uuid, handle = place
        if offset + nbytes > size:
            raise ValueError(f"{nbytes} bytes at {offset} are not in a segment of {size}")
        segment = self._segments.get(number)
        if segment is None:
            library = self._get_library()
            if not self._devices:
                self._devices = library.devices()
            device = self._devices.index(uuid.hex())
            segment = self._segments[number] = _OpenSegment(library, self._name, device, size, handle)
        return AddressedTensor(_DeviceBlock(self, segment, number << _OFFSET_BITS | offset, offset), 0, shape, dtype)

    def retire(self, numbers: Iterable[int]) -> None:
        """Close segments. The peer sends this when all of their blocks are free."""
        RECLAIMER.post(partial(self._close_segments, list(numbers)))

    def close(self) -> None:
        """Note that the peer has exited. A segment is closed when the last tensor in it is freed."""
        self._is_closed = True
        self._segments.clear()

    def _close_segments(self, numbers: list[int]) -> None:
        for number in numbers:
            segment = self._segments.pop(number, None)
            if segment is not None:
                segment.close()
        self._send_numbers(Kind.DEVICE_CLOSED, numbers)

    def release(self, number: int, segment: _OpenSegment, is_lent: bool) -> None:
        """Release a block. If it ``is_lent`` to another library, wait first until the device has finished its work. Any
        thread; safe in a finalizer."""
        self._unused.append((number, segment, is_lent))
        if not self._is_posted:
            self._is_posted = True
            RECLAIMER.post(self._release_unused)

    def _release_unused(self) -> None:
        """Release all unused blocks of the last `GATHER_S` seconds together: each wait for a device slows down the
        other processes that use it."""
        if any(is_lent for _, _, is_lent in self._unused):
            sleep(GATHER_S)
        self._is_posted = False  # first, so that a block that is added from here on is released, too
        unused = [self._unused.popleft() for _ in range(len(self._unused))]
        lent = {segment.device: segment for _, segment, is_lent in unused if is_lent}
        for segment in lent.values():
            segment.wait()
        self._send_numbers(Kind.DEVICE_FREE, [number for number, _, _ in unused])

    def _send_numbers(self, kind: Kind, numbers: Sequence[int]) -> None:
        if not self._is_closed:
            for begin in range(0, len(numbers), MAX_INTEGERS):
                self._send(integers_frame(kind, numbers[begin : begin + MAX_INTEGERS]))


class _OpenSegment:
    """A segment of the peer, opened by `address`. Closed with the last reference, unless `close` was called."""

    def __init__(self, library: CudaLibrary, name: str, device: int, size: int, handle: bytes) -> None:
        self._library, self._name, self._number = library, name, device
        self._size, self._handle = size, handle
        self._lock = threading.Lock()
        self._address = 0
        self.device = library.kind, device

    def address(self) -> int:
        """Return the address in this process. Raises `BackendError` if the segment cannot be opened. Blocks."""
        with self._lock:
            if not self._address:
                try:
                    self._address = self._open()
                except CudaError as error:
                    raise BackendError(
                        f"a tensor of '{self._name}' on GPU {self._number} cannot be read: {error}"
                    ) from error
            return self._address

    def read(self, offset: int, size: int) -> memoryview:
        """Copy ``size`` bytes to the host and return them. Raises `BackendError`. Blocks."""
        copied, address = np.empty(size, np.uint8), self.address() + offset
        try:
            with self._library.using(self._number):
                self._library.read(copied.ctypes.data, address, size)
        except CudaError as error:
            raise BackendError(f"a tensor of '{self._name}' on GPU {self._number} cannot be read: {error}") from error
        return copied.data

    def wait(self) -> None:
        """Wait until the device has finished its work. Blocks."""
        while True:
            try:
                with self._library.using(self._number):
                    self._library.wait()
            except CudaError as error:
                if error.is_for_a_capture:
                    sleep(GATHER_S)
                    continue
                log.debug("GPU %d: %s", self._number, error)  # from an earlier kernel: none is running now
            return

    def close(self) -> None:
        """Wait until the device has finished its work, and close the segment. Blocks."""
        address, self._address = self._address, 0
        if address:
            self.wait()
            try:
                with self._library.using(self._number):
                    self._library.close(address)
            except CudaError as error:
                log.debug("GPU %d: %s", self._number, error)

    def _open(self) -> int:
        library = self._library
        with library.using(self._number):
            address = library.open(self._handle)
            if library.size(address) < self._size:
                library.close(address)
                raise CudaError("the allocation is smaller than its sender says")
        return address

    def __del__(self) -> None:
        if self._address:
            library, device, address = self._library, self._number, self._address
            RECLAIMER.post(lambda: _close(library, device, address))


def _close(library: CudaLibrary, device: int, address: int) -> None:
    library.use(device)
    try:
        library.wait()
    finally:
        library.close(address)


class _DeviceBlock:
    """The memory of one tensor in a segment of the peer. A `headrace_engines.AddressedMemory`."""

    def __init__(self, memory: ReceivedDeviceMemory, segment: _OpenSegment, number: int, offset: int) -> None:
        self._memory, self._segment, self._number, self._offset = memory, segment, number, offset
        self.device = segment.device
        self._is_lent = False

    def address(self, offset: int) -> int:
        self._is_lent = True
        return self._segment.address() + self._offset + offset

    def copy(self, offset: int, size: int) -> memoryview:
        return self._segment.read(self._offset + offset, size)

    def __del__(self) -> None:
        self._memory.release(self._number, self._segment, self._is_lent)
