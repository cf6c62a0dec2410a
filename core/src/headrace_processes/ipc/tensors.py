"""The binary form of tensors in a message::

    header length u16 | place u8 | bytes u64 | offset u64
    header   data type u8 (as in a config) | rank u8 | shape i64[rank] | name, UTF-8

``place`` says where the bytes are:

====  ==============================================================================================================
0     in the frame; ``offset`` counts from the start of its data
1     in the sender's arena, at ``offset``. Tensors of `INLINE` bytes or more are put there while there is room
2     of an input: in the memory of a client, at ``offset`` of the mapping whose number, u64, follows the header
3     of an output: the sender has written them to the target of its request (`Placed`)
4     in the memory of a GPU (`headrace_processes.ipc.device_codec`)
====  ==============================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from struct import Struct
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.tensor import BytesTensor, Tensor, data_type, wire_bytes, wire_view
from headrace_processes.ipc.framing import PADDING, Buffer, Frame, ProtocolError

Bytes: TypeAlias = "npt.NDArray[np.uint8]"

#: A tensor of this many bytes or more is put in the arena.
INLINE: Final = 32 * 1024

#: The most entries of a cache of encoded headers or names.
_MAX_CACHED: Final = 1024

#: Header length, place, bytes and offset.
TENSOR: Final = Struct("<HBQQ")
_NUMBER = Struct("<Q")
#: A decoded header: name, data type, shape, and bytes, which are -1 for strings.
_Header: TypeAlias = tuple[str, DataType, tuple[int, ...], int]


Key = TypeVar("Key")
Value = TypeVar("Value")


def add_to_cache(cache: dict[Key, Value], key: Key, value: Value) -> None:
    """Store ``value`` in ``cache``. Clear it first if it is full: clients choose shapes and names."""
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value


class Allocator(Protocol):
    """Allocates memory for large tensors: the `headrace_processes.ipc.arena.Writer` of this side."""

    def place(self, data: memoryview) -> int | None: ...

    def release(self, offset: int) -> None: ...


class Views(Protocol):
    """Gives views of the peer's large tensors: the `headrace_processes.ipc.arena.Reader` of this side."""

    def view(self, offset: int, nbytes: int, on_free: Callable[[int], None]) -> Any: ...


class ClientMemory(Protocol):
    """Finds tensors in the memory of clients: the `headrace_processes.ipc.mappings.SentMappings` of this side."""

    def place(self, tensor: Any) -> tuple[int, int] | None: ...


class Mapped(Protocol):
    """Gives views of the memory of clients: the `headrace_processes.ipc.mappings.ReceivedMappings` of this side."""

    def view(self, number: int, offset: int, nbytes: int) -> Any: ...


class Placed:
    """An output whose bytes were written to the target of its request. ``tensor`` is a view or the original of them."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class TensorWriter:
    """Encodes tensors. ``allocator`` is the arena of this side, or None. ``clients`` is set only for a side that
    sends inputs: inputs in this memory are not copied."""

    def __init__(self, allocator: Allocator | None, clients: ClientMemory | None = None) -> None:
        self._allocator, self._clients = allocator, clients
        #: The offsets in the arena of the tensors of the current message. The encoder clears it before each message.
        self.placed: list[int] = []
        self._headers: dict[Any, bytes] = {}

    def write(self, name: str, tensor: Tensor, meta: list[bytes], data: list[Buffer], size: int) -> int:
        """Append ``tensor`` to a message with ``size`` bytes of data. Return the new size."""
        header, nbytes = self._header(name, tensor), tensor.nbytes
        if nbytes >= INLINE and self._allocator is not None:
            offset = self._allocator.place(wire_view(tensor))
            if offset is not None:
                self.placed.append(offset)
                meta += (TENSOR.pack(len(header), 1, nbytes, offset), header)
                return size
        meta += (TENSOR.pack(len(header), 0, nbytes, size), header)
        data.append(wire_bytes(tensor))
        if rest := -nbytes % 8:
            data.append(PADDING[rest])
        return size + nbytes + rest

    def write_input(self, name: str, tensor: Tensor, meta: list[bytes], data: list[Buffer], size: int) -> int:
        """Like `write`, but an input in the memory of a client is not copied. Return the new size."""
        if tensor.nbytes >= INLINE and self._clients is not None and type(tensor) is np.ndarray:
            place = self._clients.place(tensor)
            if place is not None:
                header, (number, offset) = self._header(name, tensor), place
                meta += (TENSOR.pack(len(header), 2, tensor.nbytes, offset), header, _NUMBER.pack(number))
                return size
        return self.write(name, tensor, meta, data, size)

    def write_placed(self, name: str, output: Placed, meta: list[bytes]) -> None:
        """Append the description of an output whose bytes are at their target."""
        header = self._header(name, output.tensor)
        meta += (TENSOR.pack(len(header), 3, output.tensor.nbytes, 0), header)

    def free_placed(self) -> None:
        """Free the blocks in ``placed``: the message will not be sent."""
        if self._allocator is not None:
            for offset in self.placed:
                self._allocator.release(offset)

    def _header(self, name: str, tensor: Tensor) -> bytes:
        key = (name, tensor.shape, None if type(tensor) is BytesTensor else tensor.dtype)  # type: ignore[union-attr]
        header = self._headers.get(key)
        if header is None:
            shape = tensor.shape
            value = data_type(tensor).config_value
            header = Struct(f"<BB{len(shape)}q").pack(value, len(shape), *shape) + name.encode()
            add_to_cache(self._headers, key, header)
        return header


class TensorReader:
    """Decodes tensors. ``views`` is the peer's arena, or None. ``free`` is called with an offset in it once the last
    view of the tensor there is freed, on any thread. ``clients`` is the memory of clients that the peer has sent."""

    def __init__(self, views: Views | None, free: Callable[[int], None], clients: Mapped | None = None) -> None:
        self._views, self._free, self._clients = views, free, clients
        self._headers: dict[bytes, _Header] = {}

    def read(
        self, message: Frame, position: int, targets: Mapping[str, memoryview] | None = None
    ) -> tuple[str, Tensor, int]:
        """Return the name of the tensor at ``position``, a view of it, and the end of its description.

        ``targets`` is the memory of its request's outputs, by name. Raises `ProtocolError`, and `LookupError` or
        `TypeError` for an output that has no target.
        """
        body = message.body
        header_size, place, nbytes, offset = TENSOR.unpack_from(body, position)
        position += TENSOR.size
        end = position + header_size
        key = bytes(body[position:end])
        name, datatype, shape, expected = self._headers.get(key) or self._header(key)
        if expected not in (nbytes, -1):
            raise ProtocolError(f"kind {message.kind}: {nbytes} bytes for {datatype}{list(shape)}")
        content: Any
        if place:
            content, begin = self._outside_frame(message, end, place, nbytes, offset, name, targets), 0
            end += _NUMBER.size * (place == 2)
        else:
            content, begin = body, message.data + offset
            if begin + nbytes > len(body):
                raise ProtocolError(f"kind {message.kind}: a tensor runs past the frame")
        if expected == -1:
            return name, BytesTensor(memoryview(content)[begin : begin + nbytes], shape), end
        return name, np.ndarray(shape, datatype.numpy, content, begin), end

    def _outside_frame(
        self,
        message: Frame,
        end: int,
        place: int,
        nbytes: int,
        offset: int,
        name: str,
        targets: Mapping[str, memoryview] | None,
    ) -> Any:
        """Return the bytes of a tensor that are not in the frame. ``end`` is the end of its header."""
        if place == 1 and self._views is not None:
            return self._views.view(offset, nbytes, self._free)
        if place == 2 and self._clients is not None:
            return self._clients.view(_NUMBER.unpack_from(message.body, end)[0], offset, nbytes)
        if place != 3:
            raise ProtocolError(f"kind {message.kind}: there is no memory {place}")
        target = targets[name]  # type: ignore[index]  # a TypeError, as documented
        if nbytes > target.nbytes:
            raise ProtocolError(f"kind {message.kind}: {nbytes} bytes of '{name}' in {target.nbytes}")
        return target[:nbytes]

    def _header(self, key: bytes) -> _Header:
        value, rank = key[0], key[1]
        shape = Struct(f"<{rank}q").unpack_from(key, 2)
        if any(dim < 0 for dim in shape):
            raise ProtocolError(f"a shape {list(shape)}")
        datatype = dtypes.BY_CONFIG_VALUE[value]
        expected = prod(shape) * datatype.itemsize if datatype is not dtypes.BYTES else -1
        header = str(key[2 + 8 * rank :], "utf-8"), datatype, shape, expected
        add_to_cache(self._headers, key, header)
        return header
