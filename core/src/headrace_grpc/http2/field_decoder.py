"""Decodes the fields of header blocks (RFC 7541). The common forms of a field are decoded here, the rest by ``hpack``,
which takes ten times as long. The speed matters: many clients send a block with a new value in every call.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from headrace_grpc.http2.frames import COMPRESSION_ERROR, ENHANCE_YOUR_CALM, ConnectionFault

Fields: TypeAlias = "list[tuple[bytes, bytes]]"

#: RFC 7541, section 4.1, adds this to the size of each field.
OVERHEAD_BYTES = 32
#: A block may begin with two updates of the table's size (RFC 7541, section 4.2): the smallest size, and the last.
_SIZE_UPDATES = 2
_STATIC = HeaderTable.STATIC_TABLE


#: Bytes that are each a whole field: an index of the table. 0x80 (index 0) is invalid; 0xFF begins a longer index.
_INDEXED = bytes(range(0x81, 0xFF))
#: Fills the places of `_Table.by_byte` that are no index.
_NOTHING = (b"", b"")


class _Table(HeaderTable):
    """A header table that also finds a field by the byte that encodes its index."""

    def __init__(self) -> None:
        super().__init__()
        #: The field of each byte. Changed in place. Has more than 256 entries if the dynamic table is long.
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
    """Decodes the header blocks of one connection, in order."""

    def __init__(self, most_bytes: int) -> None:
        """``most_bytes`` is the largest size of the fields of one block, each counted with `OVERHEAD_BYTES` more."""
        self.most_bytes = most_bytes
        self._decoder = Decoder(most_bytes)
        self._decoder.header_table = self._table = _Table()
        self._field_of = self._table.by_byte.__getitem__

    def front(self, block: bytes) -> tuple[tuple[bytes, bytes], ...]:
        """Return the fields at the beginning of ``block`` that are one byte each: those that clients repeat.

        Raises `ConnectionFault` if one of them is not in the table.
        """
        try:
            return tuple(map(self._field_of, block[: len(block) - len(block.lstrip(_INDEXED))]))
        except IndexError as error:
            raise ConnectionFault(COMPRESSION_ERROR, "malformed header block") from error

    def decode(self, block: bytes, begin: int = 0) -> Fields:
        """Return the fields of ``block`` from the byte ``begin`` on.

        Raises `ConnectionFault` if the block is malformed or too large: the table may differ from the peer's then.
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
        """Append to ``fields`` those of ``block`` from the byte ``at`` on, up to the first uncommon or malformed one.

        Return where that one begins, or the end. Raises `HPACKError` for an invalid Huffman code.
        """
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
    """Return the fault for a header list that is larger than the limit."""
    return ConnectionFault(ENHANCE_YOUR_CALM, "headers are too large")


def size_of(fields: Fields) -> int:
    """Return the size of ``fields`` in bytes as RFC 9113, section 6.5.2, counts it."""
    return sum([len(name) + len(value) for name, value in fields]) + OVERHEAD_BYTES * len(fields)


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Return the string at ``at`` and its end. The end is beyond the block if the string is incomplete or very long."""
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


#: Cached, because most Huffman-coded strings are names, and there are few names.
_unpacked = lru_cache(512)(decode_huffman)


def _is_size_update(byte: int) -> bool:
    """True if ``byte`` begins an update of the table's size (RFC 7541, section 6.3)."""
    return byte & 0xE0 == 0x20


def _check_size_updates(block: bytes) -> None:
    """Raise `ConnectionFault` if ``block`` begins with too many updates of the table's size.

    An update is one byte to send, and work to apply.
    """
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
