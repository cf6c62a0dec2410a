"""Opens archives by the ending of their name. The same content is the same bytes, whenever it is written."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from headrace import ConfigError, InvalidArgument

ENDINGS = (".tar.gz", ".tar.zst", ".tar")
#: Weights hardly shrink, and a higher level takes several times as long.
_GZIP_LEVEL, _ZSTD_LEVEL = 3, 6


def check_ending(path: Path) -> str:
    """Return the name of ``path`` without its ending. Raises `InvalidArgument` for another ending, and `ConfigError` if
    this environment cannot write it."""
    for ending in ENDINGS:
        if path.name.endswith(ending) and path.name != ending:
            if ending == ".tar.zst" and find_spec("zstandard") is None:
                raise ConfigError(f"'{path}' needs what is not installed here: pip install 'headrace-bundle[zstd]'")
            return path.name.removesuffix(ending)
    raise InvalidArgument(f"'{path}' is no name of an archive; the endings are {', '.join(ENDINGS)}")


@contextmanager
def write_archive(file: IO[bytes], name: str) -> Iterator[tarfile.TarFile]:
    """Yield an archive that is written to ``file``, compressed by the ending of ``name``."""
    with ExitStack() as stack:
        inner: Any = file
        if name.endswith(".gz"):
            inner = stack.enter_context(gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0))
        elif name.endswith(".zst"):
            import zstandard

            inner = stack.enter_context(zstandard.ZstdCompressor(_ZSTD_LEVEL).stream_writer(file, closefd=False))
        yield stack.enter_context(tarfile.open(fileobj=inner, mode="w|", format=tarfile.PAX_FORMAT))


@contextmanager
def read_archive(path: Path) -> Iterator[tarfile.TarFile]:
    """Give the archive ``path``, to be read from its begin to its end. Raises `OSError` and `tarfile.TarError`."""
    check_ending(path)
    with path.open("rb") as file, ExitStack() as stack:
        inner: Any = file
        if path.name.endswith(".gz"):
            inner = stack.enter_context(gzip.GzipFile(fileobj=file))
        elif path.name.endswith(".zst"):
            import zstandard

            reader = zstandard.ZstdDecompressor().stream_reader(file)
            inner = stack.enter_context(io.BufferedReader(reader))
            stack.enter_context(_as_tar_error(zstandard.ZstdError))
        yield stack.enter_context(tarfile.open(fileobj=inner, mode="r|"))


@contextmanager
def _as_tar_error(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except kind as error:
        raise tarfile.ReadError(str(error)) from error
