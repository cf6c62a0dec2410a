"""Requests and answers with tensors in the memory of a GPU (`headrace_processes.ipc.device_memory`).

In a message, such a tensor is at place 4 (`headrace_processes.ipc.tensors`): ``offset`` counts in a segment, which
follows the header as `headrace_processes.ipc.device_memory.PLACE`. If the sender of a request takes an output on the
device, the settings have a special target for it: `_ON_DEVICE`, or `_ON_BOTH` if the sender takes it on the host, too.
Only instances on a GPU use these classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from headrace.messages.device_tensor import DeviceTensor
from headrace.messages.request import LocatedRequest
from headrace.messages.tensor import Tensor
from headrace.messages.ticket import Ticket
from headrace_processes.ipc.codec import Decoder, Encoder
from headrace_processes.ipc.device_memory import PLACE, ReceivedDeviceMemory, StagedTensor
from headrace_processes.ipc.framing import Buffer, Frame, ProtocolError
from headrace_processes.ipc.replies import Reply, Times
from headrace_processes.ipc.tensors import (
    TENSOR,
    Allocator,
    Bytes,
    ClientMemory,
    Mapped,
    Placed,
    TensorReader,
    TensorWriter,
    Views,
)

_DEVICE: Final = 4
_ON_DEVICE: Final = (0, 0, 0)
_ON_BOTH: Final = (0, 0, 1)
#: The decoded target of an output that is taken on the device, and of one that is taken on the host, too.
ON_DEVICE: Final[Bytes] = np.empty(0, np.uint8)
ON_BOTH: Final[Bytes] = np.empty(0, np.uint8)

#: The prefix of the name of an output that is a copy, in the host's memory, of the output with the rest of the name.
HOST_COPY: Final = "\0"


def has_device_tensor(tensors: Mapping[str, Any]) -> bool:
    """True if one of ``tensors`` is a `DeviceTensor`."""
    return any(isinstance(value, DeviceTensor) for value in tensors.values())


def on_device_of(targets: Mapping[str, Bytes]) -> dict[str, bool]:
    """Return the `headrace.Ticket.on_device` of a request with these ``targets``."""
    return {name: each is ON_BOTH for name, each in targets.items() if each is ON_DEVICE or each is ON_BOTH}


class DeviceTensorWriter(TensorWriter):
    """Encodes `StagedTensor`s, too. ``staged`` has those of the current message."""

    def __init__(self, allocator: Allocator | None, clients: ClientMemory | None = None) -> None:
        super().__init__(allocator, clients)
        self.staged: list[StagedTensor] = []

    def write(self, name: str, tensor: Any, meta: list[bytes], data: list[Buffer], size: int) -> int:
        if type(tensor) is not StagedTensor:
            return super().write(name, tensor, meta, data, size)
        self._write_staged(name, tensor, meta)
        return size

    def write_placed(self, name: str, output: Placed, meta: list[bytes]) -> None:
        if isinstance(output.tensor, StagedTensor):
            self._write_staged(name, output.tensor, meta)
        else:
            super().write_placed(name, output, meta)

    def _write_staged(self, name: str, tensor: StagedTensor, meta: list[bytes]) -> None:
        header = self._header(name, tensor)  # type: ignore[arg-type]  # it has a shape and a dtype
        meta += (TENSOR.pack(len(header), _DEVICE, tensor.nbytes, tensor.offset), header, tensor.place)
        self.staged.append(tensor)

    def free_placed(self) -> None:
        super().free_placed()
        self.staged.clear()  # this frees their blocks

    def sent(self, message: bytes) -> bytes:
        """Mark the staged tensors of ``message`` as sent, so that the peer frees their blocks. Return ``message``."""
        for each in self.staged:
            each.is_sent = True
        self.staged.clear()
        return message


class DeviceEncoder(Encoder):
    """An `Encoder` of messages with `StagedTensor`s: as inputs, and as the tensors of `Placed` outputs."""

    def __init__(self, allocator: Allocator | None, clients: ClientMemory | None = None) -> None:
        super().__init__(allocator, clients)
        self._tensors: DeviceTensorWriter = DeviceTensorWriter(allocator, clients)

    def requests(self, batch: Sequence[tuple[int, Ticket]]) -> bytes:
        return self._tensors.sent(super().requests(batch))

    def request(self, call: int, request: Any) -> bytes:
        return self._tensors.sent(super().request(call, request))

    def answers(self, replies: Sequence[Reply], times: Times | None = None) -> bytes:
        return self._tensors.sent(super().answers(replies, times))

    def _targets(self, request: LocatedRequest) -> dict[str, tuple[int, int, int]]:
        targets = super()._targets(request)
        for name, is_on_host in (request.on_device or {}).items():
            targets[name] = _ON_BOTH if is_on_host else _ON_DEVICE
        return targets


class DeviceTensorReader(TensorReader):
    """Decodes tensors that are in ``devices``, too."""

    def __init__(
        self, views: Views | None, free: Callable[[int], None], clients: Mapped, devices: ReceivedDeviceMemory
    ) -> None:
        super().__init__(views, free, clients)
        self._devices = devices

    def read(
        self, message: Frame, position: int, targets: Mapping[str, memoryview] | None = None
    ) -> tuple[str, Tensor, int]:
        header_size, place, nbytes, offset = TENSOR.unpack_from(message.body, position)
        if place != _DEVICE:
            return super().read(message, position, targets)
        end = position + TENSOR.size + header_size
        key = bytes(message.body[position + TENSOR.size : end])
        name, datatype, shape, expected = self._headers.get(key) or self._header(key)
        if expected != nbytes:
            raise ProtocolError(f"kind {message.kind}: {nbytes} bytes for {datatype}{list(shape)} on a device")
        segment = PLACE.unpack_from(message.body, end)
        tensor: Any = self._devices.tensor(segment, offset, nbytes, shape, datatype.numpy)
        return name, tensor, end + PLACE.size


class DeviceDecoder(Decoder):
    """A `Decoder` of messages with tensors in ``devices``. Requests may have `ON_DEVICE` and `ON_BOTH` as targets."""

    def __init__(
        self,
        views: Views | None,
        free: Callable[[int], None],
        devices: ReceivedDeviceMemory,
        clients: Mapped | None = None,
    ) -> None:
        mapped = _Targets(clients)
        super().__init__(views, free, mapped)
        self._tensors: DeviceTensorReader = DeviceTensorReader(views, free, mapped, devices)


class _Targets:
    """The memory of clients, `ON_DEVICE` and `ON_BOTH`."""

    def __init__(self, clients: Mapped | None) -> None:
        self._clients = clients

    def view(self, number: int, offset: int, nbytes: int) -> Any:
        if not number:
            return ON_BOTH if nbytes else ON_DEVICE
        if self._clients is None:
            raise ValueError("there is no memory of clients")
        return self._clients.view(number, offset, nbytes)
