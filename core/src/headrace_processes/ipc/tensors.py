"""The binary form of tensors in a message::

    header length u16 | place u8 | bytes u64 | offset u64
    header   data type u8 (as in a config) | rank u8 | shape i64[rank] | name, UTF-8

``place`` is 0 if the bytes are in the frame, and ``offset`` counts from the start of its data. It is 1 if they are in
the sender's arena, at ``offset``. Tensors of `INLINE` bytes or more are put in the arena while there is room.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from struct import Struct
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np

from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.tensor import BytesTensor, Tensor, data_type, wire_bytes, wire_view
from headrace_processes.ipc.framing import PADDING, Buffer, Frame, ProtocolError

#: A tensor of this many bytes or more is put in the arena.
INLINE: Final = 32 * 1024

#: The most entries of a cache of encoded headers or names.
_MOST_REMEMBERED: Final = 1024

_TENSOR = Struct("<HBQQ")
#: A decoded header: name, data type, shape, and bytes, which are -1 for strings.
_Header: TypeAlias = tuple[str, DataType, tuple[int, ...], int]


Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(known: dict[Key, Value], key: Key, value: Value) -> None:
    """Store ``value`` in a cache, which is cleared first if it is full: clients choose shapes and names."""
    if len(known) >= _MOST_REMEMBERED:
        known.clear()
    known[key] = value


class Allocator(Protocol):
    """Allocates memory for large tensors: the `headrace_processes.ipc.arena.Writer` of this side."""

    def place(self, data: memoryview) -> int | None: ...

    def release(self, offset: int) -> None: ...


class Views(Protocol):
    """Gives views of the peer's large tensors: the `headrace_processes.ipc.arena.Reader` of this side."""

    def view(self, offset: int, nbytes: int, on_free: Callable[[int], None]) -> Any: ...


class TensorWriter:
    """Encodes tensors. ``allocator`` is the arena of this side, or None."""

    def __init__(self, allocator: Allocator | None) -> None:
        self._allocator = allocator
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
                meta += (_TENSOR.pack(len(header), 1, nbytes, offset), header)
                return size
        meta += (_TENSOR.pack(len(header), 0, nbytes, size), header)
        data.append(wire_bytes(tensor))
        if rest := -nbytes % 8:
            data.append(PADDING[rest])
        return size + nbytes + rest

    def take_back(self) -> None:
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
            remember(self._headers, key, header)
        return header


class TensorReader:
    """Decodes tensors. ``views`` is the peer's arena, or None. ``free`` is called with an offset in it once the last
    view of the tensor there is freed, on any thread."""

    def __init__(self, views: Views | None, free: Callable[[int], None]) -> None:
        self._views, self._free = views, free
        self._headers: dict[bytes, _Header] = {}

    def read(self, message: Frame, position: int) -> tuple[str, Tensor, int]:
        """Return the name of the tensor at ``position``, a view of it, and the end of its description. Raises
        `ProtocolError`."""
        body = message.body
        header_size, place, nbytes, offset = _TENSOR.unpack_from(body, position)
        position += _TENSOR.size
        end = position + header_size
        key = bytes(body[position:end])
        known = self._headers.get(key)
        name, datatype, shape, expected = known or self._header(key)
        if expected not in (nbytes, -1):
            raise ProtocolError(f"kind {message.kind}: {nbytes} bytes for {datatype}{list(shape)}")
        content: Any
        if place:
            if self._views is None:
                raise ProtocolError(f"kind {message.kind}: there is no arena")
            content, begin = self._views.view(offset, nbytes, self._free), 0
        else:
            content, begin = body, message.data + offset
            if begin + nbytes > len(body):
                raise ProtocolError(f"kind {message.kind}: a tensor runs past the frame")
        if expected == -1:
            return name, BytesTensor(memoryview(content)[begin : begin + nbytes], shape), end
        return name, np.ndarray(shape, datatype.numpy, content, begin), end

    def _header(self, key: bytes) -> _Header:
        value, rank = key[0], key[1]
        shape = Struct(f"<{rank}q").unpack_from(key, 2)
        if any(dim < 0 for dim in shape):
            raise ProtocolError(f"a shape {list(shape)}")
        datatype = dtypes.BY_CONFIG_VALUE[value]
        expected = prod(shape) * datatype.itemsize if datatype is not dtypes.BYTES else -1
        found = str(key[2 + 8 * rank :], "utf-8"), datatype, shape, expected
        remember(self._headers, key, found)
        return found
