"""Shared memory of clients in model processes: tensors in it are sent as a number and an offset, without their bytes.

The server sends the descriptor of a `SharedMapping` over a socket of its own, before the first request that has a
tensor in it, and ``UNMAP`` when the mapping is freed. So a process maps only memory that its requests use, and opens
nothing by name. A message on that socket is ``number u64 | offset u64 | size u64`` with one descriptor.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Iterable, Mapping
from struct import Struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from headrace.messages.response import InferResponse
from headrace.messages.tensor import as_tensor, wire_view
from headrace_processes.ipc.shared_mapping import SharedMapping, mapping_of
from headrace_processes.ipc.tensors import INLINE, Bytes, Placed

#: The most mappings in one process.
_MAX_MAPPINGS: Final = 4096
_MAPPING = Struct("<QQQ")


class SentMappings:
    """The mappings that the peer has. Event loop only.

    ``descriptors`` is the socket for them. ``freed`` is called with the number of a mapping that was freed, on any
    thread.
    """

    def __init__(self, descriptors: socket.socket, freed: Callable[[int], None]) -> None:
        descriptors.setblocking(False)
        self._socket, self._freed = descriptors, freed
        #: The mappings by their id, and by number.
        self._sent: dict[int, _Sent] = {}
        self._by_number: dict[int, _Sent] = {}
        self._count = 0

    def place(self, tensor: npt.NDArray[Any] | memoryview) -> tuple[int, int] | None:
        """Return the number of the mapping that contains ``tensor``, and the offset in it.

        Return None if the tensor must be copied: it is in no mapping, or the descriptor cannot be sent.
        """
        located = mapping_of(tensor)
        if located is None:
            return None
        mapping, offset = located
        sent = self._sent.get(id(mapping))
        if sent is None or sent() is not mapping:
            sent = self._send(mapping)
        return None if sent is None or not sent.number else (sent.number, offset)

    def mark_lost(self, numbers: Iterable[int]) -> None:
        """Note that the peer has lost the pages of these mappings."""
        for number in numbers:
            sent = self._by_number.get(number)
            mapping = None if sent is None else sent()
            if mapping is not None:
                mapping.lose()

    def _send(self, mapping: SharedMapping) -> _Sent | None:
        if len(self._sent) >= _MAX_MAPPINGS:
            return None
        sent = _Sent(mapping, self._on_freed)
        sent.key, sent.number = id(mapping), 0
        try:
            descriptor = mapping.reopen()
        except OSError:  # permanent
            self._sent[sent.key] = sent
            return None
        try:
            number = self._count + 1
            socket.send_fds(self._socket, [_MAPPING.pack(number, mapping.offset, mapping.size)], [descriptor])
        except OSError:  # the socket is full: a later request tries again
            return None
        finally:
            os.close(descriptor)
        self._count = sent.number = number
        self._sent[sent.key] = self._by_number[number] = sent
        return sent

    def _on_freed(self, sent: weakref.ref[SharedMapping]) -> None:
        assert isinstance(sent, _Sent)
        if self._sent.get(sent.key) is sent:
            del self._sent[sent.key]
        if self._by_number.pop(sent.number, None) is not None:
            self._freed(sent.number)


class _Sent(weakref.ref[SharedMapping]):
    """A mapping that the peer has as ``number``, or 0 if its descriptor cannot be sent."""

    __slots__ = ("key", "number")
    key: int
    number: int


class ReceivedMappings:
    """The mappings that the peer has sent over ``descriptors``. One thread."""

    def __init__(self, descriptors: int) -> None:
        self._socket = socket.socket(fileno=descriptors)
        #: The mappings by number; None for one that could not be mapped.
        self._known: dict[int, SharedMapping | None] = {}
        self._used: set[int] = set()
        self._newest = 0

    def view(self, number: int, offset: int, nbytes: int) -> Bytes:
        """Return ``nbytes`` at ``offset`` of a mapping, without a copy. Raises `ValueError` if they are not in it.

        The mapping is kept as long as the view or anything made from it. If the mapping is lost, the bytes are zeros.
        """
        self._receive_until(number)
        self._used.add(number)
        mapping = self._known[number]
        if mapping is None:
            return np.zeros(nbytes, np.uint8)
        if offset < 0 or nbytes < 0 or offset + nbytes > mapping.size:
            raise ValueError(f"{nbytes} bytes at {offset} are not in a mapping of {mapping.size}")
        return np.asarray(mapping)[offset : offset + nbytes]

    def release(self, numbers: Iterable[int]) -> None:
        """Release mappings: the peer has freed them."""
        for number in numbers:
            self._receive_until(number)
            del self._known[number]

    def take_lost(self) -> list[int]:
        """Return the numbers of the mappings that were used since the last call and are lost."""
        if not self._used:
            return []
        used, self._used = self._used, set()
        return [each for each in used if (mapping := self._known.get(each)) is None or mapping.is_lost]

    def _receive_until(self, number: int) -> None:
        while number not in self._known:
            if number <= self._newest:
                raise ValueError(f"mapping {number} was released before")
            self._receive()

    def _receive(self) -> None:
        content, descriptors, _, _ = socket.recv_fds(self._socket, _MAPPING.size, 1)
        try:
            if len(content) != _MAPPING.size or len(descriptors) != 1:
                raise ValueError(f"{len(content)} bytes and {len(descriptors)} descriptors are no mapping")
            number, offset, size = _MAPPING.unpack(content)
            self._newest = number
            try:
                self._known[number] = SharedMapping(descriptors[0], offset, size)
            except OSError:  # the file has shrunk, or there is no address space left
                self._known[number] = None
        finally:
            for each in descriptors:
                os.close(each)


def with_placed_outputs(response: InferResponse, targets: Mapping[str, Bytes]) -> InferResponse:
    """Copy outputs of ``response`` to ``targets`` where they fit. Return the response with these as `Placed`
    outputs."""
    outputs: dict[str, Any] = dict(response.outputs)
    for name, target in targets.items():
        if name not in outputs:
            continue
        tensor = as_tensor(outputs[name])
        if INLINE <= tensor.nbytes <= target.nbytes:
            np.copyto(target[: tensor.nbytes], np.frombuffer(wire_view(tensor), np.uint8))
            outputs[name] = Placed(tensor)
    return InferResponse(outputs, response.parameters, response.model_name, response.model_version, response.id)
