"""Writes a bundle as one archive: its tree, its models, and the manifest of both. Each file is read once."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import BinaryIO

from headrace import InvalidArgument, open_regular
from headrace_bundle.archive_files import check_ending, write_archive
from headrace_bundle.bundled_models import BundledModel
from headrace_bundle.manifest import NAME, Manifest, digest, link
from headrace_bundle.progress_line import ShowStep
from headrace_bundle.wheelhouse import TargetMachine


def write_bundle(
    tree: Path, target: TargetMachine, models: Sequence[BundledModel], output: Path, step: ShowStep
) -> str:
    """Write ``output`` atomically, and return its SHA-256. Its one folder has its name without the ending.

    Raises `InvalidArgument` for a file that cannot be read, or that changes during the call, and `OSError` for the
    output.
    """
    site = tree / f"lib/python{target.python}/site-packages"
    manifest = Manifest(
        target.python,
        target.machine,
        dict(sorted((one.name, one.version) for one in distributions(path=[str(site)]))),
        {model.name: sorted(each.name for each in model.source.iterdir() if each.name.isdigit()) for model in models},
    )
    content = [*_files_of(tree), *(pair for model in models for pair in model.files())]
    total, done = sum(path.stat().st_size for _, path in content if not path.is_symlink()), 0
    partial, top = tree.with_name(output.name), check_ending(output)
    with partial.open("wb") as raw:
        with write_archive(raw, output.name) as archive:
            for name, path in content:
                manifest.files[name] = _add(archive, f"{top}/{name}", name, path)
                done += path.lstat().st_size
                step("archive", f"{100 * done // total} % of {total / (1 << 20):,.0f} MiB")
            text = manifest.text().encode()
            archive.addfile(_member(f"{top}/{NAME}", len(text)), io.BytesIO(text))
        raw.flush()
        os.fsync(raw.fileno())
    step("archive", f"{len(content):,} files, {partial.stat().st_size / (1 << 20):,.0f} MiB", is_last=True)
    with partial.open("rb") as file:
        shown = digest("", file).removeprefix("sha256:")
    partial.replace(output)
    return shown


class _HashedFile:
    """A file that is hashed as it is read."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.hash = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        piece = self._file.read(size)
        self.hash.update(piece)
        return piece


def _files_of(tree: Path) -> list[tuple[str, Path]]:
    found = (path for path in tree.rglob("*") if path.is_symlink() or path.is_file())
    return sorted((path.relative_to(tree).as_posix(), path) for path in found)


def _add(archive: tarfile.TarFile, place: str, name: str, path: Path) -> str:
    """Add the file ``path`` and return its entry of the manifest. Links of models are followed."""
    if path.is_symlink() and not name.startswith("models"):
        member = _member(place, 0)
        member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
        archive.addfile(member)
        return link(name, member.linkname)
    try:
        file = open_regular(path)
    except OSError as error:
        raise InvalidArgument(f"'{path}' cannot be read: {error.strerror}") from error
    with file:
        state, hashed = os.fstat(file.fileno()), _HashedFile(file)
        try:
            archive.addfile(_member(place, state.st_size, is_program=bool(state.st_mode & 0o100)), hashed)
        except OSError as error:
            if error.errno is not None:  # of the output
                raise
            raise InvalidArgument(f"'{path}' changed while it was read") from error
        if file.read(1) or os.fstat(file.fileno()).st_mtime_ns != state.st_mtime_ns:
            raise InvalidArgument(f"'{path}' changed while it was read")
        file.seek(0)
        return digest(name, file) if name == "pyvenv.cfg" else f"sha256:{hashed.hash.hexdigest()}"


def _member(place: str, size: int, *, is_program: bool = False) -> tarfile.TarInfo:
    """Return a member without owner and time: the same content is the same archive."""
    member = tarfile.TarInfo(place)
    member.size, member.mode = size, 0o755 if is_program else 0o644
    return member
