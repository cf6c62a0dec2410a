"""Writes archives, good ones and hostile ones."""

from __future__ import annotations

import gzip
import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import zstandard

#: A member: name, content (None for a directory), and further fields of its `TarInfo` or `ZipInfo`.
Item: TypeAlias = "tuple[str, bytes | None, Mapping[str, object]]"


def items_of(files: Mapping[str, bytes]) -> list[Item]:
    return [(name, content, {}) for name, content in files.items()]


def tar(items: Iterable[Item], kind: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
        for name, content, more in items:
            info = tarfile.TarInfo(name)
            info.type = tarfile.REGTYPE if content is not None else tarfile.DIRTYPE
            info.size = len(content or b"")
            for key, value in more.items():
                setattr(info, key, value)
            archive.addfile(info, io.BytesIO(content or b""))
    return stream.getvalue()


def tar_gz(items: Iterable[Item]) -> bytes:
    return gzip.compress(tar(items))


def tar_zst(items: Iterable[Item]) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(tar(items))


def zipped(items: Iterable[Item]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, more in items:
            info = zipfile.ZipInfo(name if content is not None else f"{name}/")
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3
            info.external_attr = ((stat.S_IFREG if content is not None else stat.S_IFDIR) | 0o644) << 16
            for key, value in more.items():
                setattr(info, key, value)
            archive.writestr(info, content or b"")
    return stream.getvalue()


PACKERS: dict[str, Callable[[Iterable[Item]], bytes]] = {
    ".tar": tar,
    ".tar.gz": tar_gz,
    ".tgz": tar_gz,
    ".tar.zst": tar_zst,
    ".zip": zipped,
}
