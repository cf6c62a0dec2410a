"""Reads tar archives as a stream: nothing is read twice, and no header takes more memory than a chunk."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable, Iterator
from typing import BinaryIO

from headrace_archive.members import CHUNK_BYTES, ArchiveMember, Budget, Content, RefusedArchive, shown

#: zstd's own limit without ``--long``. A larger window would need that much memory.
_MAX_WINDOW_BYTES = 128 << 20
_KINDS = {
    tarfile.SYMTYPE: "a link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a device",
    tarfile.BLKTYPE: "a device",
    tarfile.FIFOTYPE: "a FIFO",
}


def plain(source: BinaryIO) -> Content:
    return source


def gunzipped(source: BinaryIO) -> Content:
    return gzip.GzipFile(fileobj=source, mode="rb")


class Unzstandard:
    """The decompressed content of a zstd file. Raises `RefusedArchive` for one that is damaged."""

    def __init__(self, source: BinaryIO) -> None:
        import zstandard  # only for such an archive

        self._error = zstandard.ZstdError
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)
        self._stream = decompressor.stream_reader(source, read_across_frames=True, closefd=False)

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except self._error as error:
            raise RefusedArchive(f"it is damaged: {error}") from error


def read_tar(source: BinaryIO, budget: Budget, inflate: Callable[[BinaryIO], Content]) -> Iterator[ArchiveMember]:
    """Yield the members of the tar archive that ``inflate`` makes of ``source``.

    The content of a member is valid until the next one is taken. Raises `RefusedArchive`, and what the decompressor
    raises.
    """
    stream = ForwardReader(inflate(source), budget)
    with tarfile.TarFile(fileobj=stream, mode="r") as archive:  # type: ignore[arg-type]  # it reads and seeks only
        for member in archive:
            budget.add_file()
            if not (member.isreg() or member.isdir()) or member.issparse():
                kind = _KINDS.get(member.type, "no regular file")
                raise RefusedArchive(
                    f"member '{shown(member.name)}' is {kind}: only files and directories are unpacked"
                )
            if member.isdir():
                yield ArchiveMember(member.name, None)
                continue
            if member.mode & 0o6000:
                raise RefusedArchive(f"member '{shown(member.name)}' is set-uid or set-gid")
            stream.seek(member.offset_data)
            yield ArchiveMember(member.name, _Part(stream, member.size), bool(member.mode & 0o100))
    if stream.last_read != bytes(tarfile.BLOCKSIZE):  # tarfile ends silently at a damaged header, and at the end
        raise RefusedArchive("it is cut off or damaged: it has no end of archive")
    stream.drain()  # so that the checksum at the end is verified


class ForwardReader:
    """A stream as a file that can seek forwards. Bytes that are read or skipped count for ``budget``."""

    def __init__(self, stream: Content, budget: Budget) -> None:
        self._stream, self._budget = stream, budget
        self._position = 0
        #: The result of the last `read`.
        self.last_read = b""

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> int:
        while self._position < position:
            if not self.read(min(position - self._position, CHUNK_BYTES)):
                break
        if position < self._position:
            raise RefusedArchive("it is damaged: a header leads backwards")
        return self._position

    def read(self, size: int) -> bytes:
        """Return ``size`` bytes, fewer at the end. Raises `RefusedArchive` for more than `CHUNK_BYTES`."""
        if not 0 <= size <= CHUNK_BYTES:
            raise RefusedArchive(f"it has a header of {size} bytes, more than {CHUNK_BYTES}")
        parts, missing = [], size
        while missing and (part := self._stream.read(missing)):
            self._budget.add_bytes(len(part))
            parts.append(part)
            missing -= len(part)
        self.last_read = b"".join(parts)
        self._position += len(self.last_read)
        return self.last_read

    def drain(self) -> None:
        """Read to the end."""
        while self.read(CHUNK_BYTES):
            pass


class _Part:
    """The next ``size`` bytes of a stream, fewer if it ends before."""

    def __init__(self, stream: ForwardReader, size: int) -> None:
        self._stream, self._left = stream, size

    def read(self, size: int) -> bytes:
        part = self._stream.read(min(size, self._left))
        self._left -= len(part)
        return part
