"""Unpacks an environment, and nothing beside it: every member is judged before it is written.

The archive comes with a model, and whoever may add a model need not be allowed to write elsewhere.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from headrace import LoadError
from headrace_python.unpacking import RefusedMember, Unpacking

#: Bytes of all files together: so many times the archive's own size, and `FREE_BYTES` in any case.
MAX_RATIO = 30
FREE_BYTES = 1 << 30
#: No header is longer, and no path; a forged length would have it read into memory.
_MAX_READ = 1 << 20

_OPENERS: dict[bytes, Callable[[IO[bytes]], Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}


#: What reading an archive of nonsense may raise.
_MALFORMED = (
    tarfile.TarError,
    EOFError,
    OverflowError,
    RecursionError,
    ValueError,
    zlib.error,
    lzma.LZMAError,
)


def unpack(archive: Path, into: Path) -> None:
    """Unpack a tar archive, plain or packed with gzip, bzip2 or xz, into the new directory ``into``.

    Owners, setuid bits and what others may write are left out. Raises `LoadError` naming the first
    member that is refused; what was unpacked until then is the caller's to remove. Raises OSError
    if ``into`` cannot be written.
    """
    with archive.open("rb") as packed:
        unpacking = Unpacking(into, max(FREE_BYTES, MAX_RATIO * os.fstat(packed.fileno()).st_size))
        try:
            _unpack(archive, _Bounded(_opened(packed)), unpacking)
        except _MALFORMED as error:
            raise LoadError(f"environment '{archive}' is no whole tar archive: {error}") from error


def _unpack(archive: Path, source: _Bounded, unpacking: Unpacking) -> None:
    with tarfile.open(fileobj=cast("BinaryIO", source), mode="r:") as members:
        for member in members:
            try:
                unpacking.add(members, member)
            except RefusedMember as error:
                name = member.name[:200].encode("unicode_escape").decode()
                raise LoadError(f"environment '{archive}' is refused: member '{name}' {error}") from error
            members.members = []  # type: ignore[attr-defined]  # tarfile keeps them all
    if source.last != bytes(tarfile.BLOCKSIZE):  # where tarfile sees no header, it stops without a word
        raise tarfile.ReadError("its end is missing")


def _opened(packed: IO[bytes]) -> Any:
    """What is in ``packed``, which its first bytes tell."""
    magic = packed.read(6)
    packed.seek(0)
    for start, opener in _OPENERS.items():
        if magic.startswith(start):
            return opener(packed)
    return packed


class _Bounded(io.RawIOBase):
    """Refuses to read at once what no header needs; tarfile reads a header as long as it says it is.

    ``last`` is what was read last: for a whole archive, a block of zeros.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= _MAX_READ:
            raise tarfile.ReadError(f"a header is {size} bytes long")
        self.last = bytes(self._call(self._source.read, size))
        return self.last

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._call(self._source.seek, offset, whence))

    def tell(self) -> int:
        return int(self._source.tell())

    def _call(self, method: Callable[..., Any], *arguments: int) -> Any:
        try:
            return method(*arguments)
        except OSError as error:  # how gzip and bz2 say that they cannot unpack
            raise tarfile.ReadError(str(error)) from error
