"""The manifest of a bundle, ``MANIFEST.json``: what is in it, and the checksum of each file."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO

from headrace import InvalidArgument
from headrace_bundle.archive_files import read_archive
from headrace_bundle.progress_line import ShowStep

NAME = "MANIFEST.json"
FORMAT = 1
_PIECE_BYTES = 1 << 20
#: The launcher changes this line, and the link to Python, if Python is elsewhere on a machine.
_HOME = re.compile(rb"^home = .*$", re.MULTILINE)
_PYTHON, _CONFIG = "bin/python", "pyvenv.cfg"


@dataclass
class Manifest:
    """The content of a bundle. ``machine`` is empty if it runs on any."""

    python: str
    machine: str
    #: Version by name.
    distributions: Mapping[str, str]
    #: Versions by name, those of the repository.
    models: Mapping[str, list[str]]
    #: ``sha256:`` and the digest of a file, or ``link:`` and the target of a link, by path.
    files: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def summary(self) -> str:
        models = ", ".join(self.models) or "none"
        machine = self.machine or "any machine"
        return f"headrace {self.distributions['headrace']}, Python {self.python}, {machine}; models: {models}"

    def text(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"


@dataclass
class Verification:
    """``differences`` are lines for people, in the order of the paths."""

    manifest: Manifest
    differences: list[str]
    files: int


def verify(path: Path, step: ShowStep) -> Verification:
    """Compare the bundle at ``path``, or its archive, with its manifest. Raises `InvalidArgument` if it is none."""
    if not path.exists():
        raise InvalidArgument(f"'{path}' does not exist")
    found: dict[str, str] = {}
    text = b""
    try:
        for name, content in _in_folder(path) if path.is_dir() else _in_archive(path):
            step("verify", f"{len(found):,} files")
            if name == NAME and not isinstance(content, str):
                text = content.read()
            else:
                found[name] = content if isinstance(content, str) else digest(name, content)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise InvalidArgument(f"'{path}' is damaged or no archive of a bundle: {error}") from error
    if not text:
        raise InvalidArgument(f"'{path}' is no bundle: it has no {NAME}")
    manifest = _parse(text, path)
    differences = []
    for name in sorted({*found, *manifest.files}):
        if name not in found:
            differences.append(f"{name}: missing")
        elif name not in manifest.files:
            differences.append(f"{name}: not in the manifest")
        elif found[name] != manifest.files[name]:
            differences.append(f"{name}: changed")
    return Verification(manifest, differences, len(manifest.files))


def digest(name: str, file: BinaryIO) -> str:
    """Return the manifest's entry of the file ``name`` with the content of ``file``."""
    if name == _CONFIG:
        return f"sha256:{hashlib.sha256(_HOME.sub(b'', file.read())).hexdigest()}"
    hashed = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        hashed.update(piece)
    return f"sha256:{hashed.hexdigest()}"


def link(name: str, target: str) -> str:
    """Return the manifest's entry of the link ``name`` to ``target``."""
    return "link:" if name == _PYTHON else f"link:{target}"


def _in_folder(root: Path) -> Iterator[tuple[str, str | BinaryIO]]:
    for parent, folders, files in os.walk(root):
        for path in sorted(Path(parent, name) for name in (*folders, *files)):
            name = path.relative_to(root).as_posix()
            if path.is_symlink():
                yield name, link(name, str(path.readlink()))
            elif path.is_file():
                with path.open("rb") as file:
                    yield name, file
            elif not path.is_dir():
                yield name, "neither a file nor a link"


def _in_archive(path: Path) -> Iterator[tuple[str, str | BinaryIO]]:
    with read_archive(path) as archive:
        for member in archive:
            name = member.name.partition("/")[2]
            if member.issym():
                yield name, link(name, member.linkname)
            elif (file := archive.extractfile(member)) is not None:
                yield name, file  # type: ignore[misc]


def _parse(text: bytes, path: Path) -> Manifest:
    try:
        found = Manifest(**json.loads(text))
        if found.format != FORMAT:
            raise InvalidArgument(f"'{path}' has a manifest of format {found.format}; this version reads {FORMAT}")
    except (ValueError, TypeError) as error:
        raise InvalidArgument(f"'{path}' has a damaged {NAME}: {error}") from error
    return found
