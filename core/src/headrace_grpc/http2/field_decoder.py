"""The fields of header blocks (RFC 7541). What nearly every field looks like is read here, the rest by ``hpack``, which
takes ten times as long: many clients send a block with something new in it for every call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from headrace_grpc.http2.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, ConnectionFault

Fields: TypeAlias = "list[tuple[bytes, bytes]]"

#: What RFC 7541, 4.1, adds to the bytes of each field.
OVERHEAD_BYTES = 32
#: RFC 7541, section 4.2: the least size since the last block, and the last one.
_SIZE_UPDATES = 2
_STATIC = HeaderTable.STATIC_TABLE


#: Bytes that are each a whole field of a block: its index in the table. Index 0 is none, and 0xFF begins a larger one.
_INDEXED = bytes(range(0x81, 0xFF))
#: What no index leads to.
_NOTHING = (b"", b"")


class _Table(HeaderTable):
    """Keeps its fields by the byte that stands for them, too."""

    def __init__(self) -> None:
        super().__init__()
        #: Changed in place. Longer than a byte can tell where the dynamic part is large.
        self.by_byte: list[tuple[bytes, bytes]] = [*(_NOTHING,) * _INDEXED[0], *_STATIC]
        self._first_dynamic = len(self.by_byte)

    def add(self, name: bytes, value: bytes) -> None:
        super().add(name, value)
        self.by_byte[self._first_dynamic :] = self.dynamic_entries

    @property
    def maxsize(self) -> int:
        return super().maxsize

    @maxsize.setter
    def maxsize(self, newmax: int) -> None:
        HeaderTable.maxsize.fset(self, newmax)  # type: ignore[attr-defined]  # a property, whatever its stub says
        self.by_byte[self._first_dynamic :] = self.dynamic_entries


class FieldDecoder:
    """Decodes the blocks of one connection, in order."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` bounds the fields of one block, each with `OVERHEAD_BYTES`."""
        self.most_bytes = most_bytes
        self._decoder = Decoder(most_bytes)
        self._decoder.header_table = self._table = _Table()
        self._field_of = self._table.by_byte.__getitem__

    def front(self, block: bytes) -> tuple[tuple[bytes, bytes], ...]:
        """The fields at the beginning of ``block`` that are each one byte: what a caller says with every call.

        Raises `ConnectionFault` if one of them is not in the table.
        """
        try:
            return tuple(map(self._field_of, block[: len(block) - len(block.lstrip(_INDEXED))]))
        except IndexError as error:
            raise ConnectionFault(COMPRESSION_ERROR, "malformed header block") from error

    def decode(self, block: bytes, begin: int = 0) -> Fields:
        """The fields of ``block`` from ``begin`` on.

        Raises `ConnectionFault` if the table can not be trusted any more.
        """
        fields: Fields = []
        try:
            at = self._read_usual(block, begin, fields)
            if at < len(block):
                if _is_size_update(block[at]):
                    if at:
                        raise ConnectionFault(COMPRESSION_ERROR, "malformed header block")
                    _check_size_updates(block)
                rest: Fields = self._decoder.decode(block[at:], raw=True)  # type: ignore[assignment]  # pairs of bytes
                fields += rest
                if at and size_of(fields) > self.most_bytes:
                    raise OversizedHeaderListError
        except OversizedHeaderListError:
            raise too_large() from None
        except (HPACKError, IndexError) as error:
            raise ConnectionFault(COMPRESSION_ERROR, "malformed header block") from error
        return fields

    def _read_usual(self, block: bytes, at: int, fields: Fields) -> int:
        """Read ``fields`` from ``block``, beginning at ``at``, up to the first that is unusual, malformed ones among
        them; where that begins. Raises `HPACKError` for what is no Huffman code."""
        by_byte, end = self._table.by_byte, len(block)
        left_bytes = self.most_bytes
        while at < end:
            byte = block[at]
            if byte & 0x80:  # a field of the table
                if byte not in _INDEXED or byte >= len(by_byte):
                    return at
                field = by_byte[byte]
                after = at + 1
            else:
                if byte & 0x60 == 0x20:
                    return at  # an update of the table's size
                most = 0x3F if byte & 0x40 else 0x0F
                index, after = byte & most, at + 1
                if index == most:
                    if after >= end or block[after] > 0x7F:
                        return at
                    index += block[after]
                    after += 1
                if not index:
                    name, after = _string(block, after)
                elif 0x80 + index < len(by_byte):
                    name = by_byte[0x80 + index][0]
                else:
                    return at
                value, after = _string(block, after)
                if after > end:
                    return at
                field = (name, value)
                if most == 0x3F:
                    self._table.add(name, value)
            left_bytes -= len(field[0]) + len(field[1]) + OVERHEAD_BYTES
            if left_bytes < 0:
                raise OversizedHeaderListError
            fields.append(field)
            at = after
        return at


def too_large() -> ConnectionFault:
    """For fields that are more than anybody may send."""
    return ConnectionFault(ENHANCE_YOUR_CALM, "headers are too large")


def size_of(fields: Fields) -> int:
    """What ``fields`` count for (RFC 9113, section 6.5.2)."""
    return sum([len(name) + len(value) for name, value in fields]) + OVERHEAD_BYTES * len(fields)


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """The string at ``at``, and where it ends: beyond the block if it is not whole, or so long that that is unusual."""
    head = block[at] if at < len(block) else 0x7F
    begin = at + 1
    end = begin + (head & 0x7F)
    if head & 0x7F == 0x7F:
        if begin >= len(block) or block[begin] > 0x7F:
            return b"", len(block) + 1
        end += block[begin] + 1
        begin += 1
    value = block[begin:end]
    return (_unpacked(value) if head & 0x80 and end <= len(block) else value), end


#: Most are names, which are few.
_unpacked = lru_cache(512)(decode_huffman)


def _is_size_update(byte: int) -> bool:
    """Whether ``byte`` begins an update of the table's size (RFC 7541, section 6.3)."""
    return byte & 0xE0 == 0x20


def _check_size_updates(block: bytes) -> None:
    """Refuse a block that begins with more updates than anyone needs: each is work, and stands in a byte."""
    at = 0
    for _ in range(_SIZE_UPDATES):
        if block[at] & 0x1F == 0x1F:
            at += 1
            while at < len(block) and block[at] & 0x80:
                at += 1
        at += 1
        if at >= len(block) or not _is_size_update(block[at]):
            return
    raise ConnectionFault(COMPRESSION_ERROR, "too many updates of the table's size")
