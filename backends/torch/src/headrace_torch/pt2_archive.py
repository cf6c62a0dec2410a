"""Reads ``model.pt2``, a zip archive of PyTorch, without PyTorch.

``torch.export.load`` may unpickle data of the file, load its native code, and pass its texts to ``eval``. So Headrace
reads and checks the file itself (`headrace_torch.program_check`). PyTorch does not compress entries, and files with
compressed entries are refused, so no entry is larger than the file.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace import LoadError, one_line, why_path_leaves
from headrace_torch.parameters import HOW_TO_TRUST

#: A parsed JSON document takes about ten times the memory of its text.
_MOST_BYTES_OF_A_DOCUMENT = 256 << 20
_PIECE_BYTES = 4 << 20
_PROGRAMS, _PACKAGES = "models/", "data/aotinductor/"


class Pt2Archive:
    """An open ``.pt2`` file. Names of records are without the common top folder.

    Raises `LoadError`, which names the file, and the model in the words of Triton's PyTorch backend.
    """

    def __init__(self, model: str, path: Path) -> None:
        self.model, self.path = model, path
        try:
            self._zip = zipfile.ZipFile(path)
            entries = self._zip.infolist()
        except (OSError, ValueError, NotImplementedError, RecursionError, zipfile.BadZipFile) as error:
            raise self.failure(f"is no zip archive, as files of torch.export and AOTInductor are: {error}") from error
        try:
            self._records = self._by_name(entries)
            self._require_kind()
            self._require_sizes(entries)
            self._require_format()
        except BaseException:
            self._zip.close()
            raise

    def __enter__(self) -> Pt2Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    @property
    def programs(self) -> Sequence[str]:
        """The names of its programs of torch.export."""
        names = [name for name in self._records if name.startswith(_PROGRAMS) and name.endswith(".json")]
        return [name[len(_PROGRAMS) : -len(".json")] for name in names]

    @property
    def packages(self) -> Sequence[str]:
        """The names of its libraries of AOTInductor."""
        names = [name[len(_PACKAGES) :] for name in self._records if name.startswith(_PACKAGES)]
        return list(dict.fromkeys(name.partition("/")[0] for name in names if "/" in name))

    def names(self, under: str) -> Sequence[str]:
        """Return the records whose names begin with ``under``."""
        return [name for name in self._records if name.startswith(under)]

    def choose(self, what: str, names: Sequence[str]) -> str:
        """Return ``model``, PyTorch's default name, if it is in ``names``, else the only name. ``what`` is their noun
        in the error."""
        if "model" in names:
            return "model"
        if len(names) != 1:
            raise self.failure(
                f"has {len(names)} {what}, and none is called 'model': {', '.join(map(one_line, names))}"
            )
        return names[0]

    def size(self, name: str) -> int:
        """Return the size of a record in bytes."""
        return self._find(name).file_size

    def read(self, name: str) -> bytes:
        """Return the content of a record."""
        content = bytearray(self.size(name))
        self.read_into(name, memoryview(content))
        return bytes(content)

    def read_into(self, name: str, memory: memoryview) -> None:
        """Copy a record into ``memory``, which has its size."""
        filled = 0
        try:
            with self._zip.open(self._find(name)) as record:
                while piece := record.read(_PIECE_BYTES):
                    memory[filled : filled + len(piece)] = piece
                    filled += len(piece)
        except (OSError, ValueError, RuntimeError, NotImplementedError, EOFError, zipfile.BadZipFile) as error:
            raise self.failure(f"is damaged at '{one_line(name)}': {error}") from error
        if filled != len(memory):
            raise self.failure(f"is damaged at '{one_line(name)}': it has {filled} bytes of {len(memory)}")

    def document(self, name: str) -> Any:
        """Return the JSON document in a record."""
        if self.size(name) > _MOST_BYTES_OF_A_DOCUMENT:
            raise self.failure(
                f"has {self.size(name)} bytes of '{one_line(name)}', and {_MOST_BYTES_OF_A_DOCUMENT} at most are read"
            )
        try:
            return json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise self.failure(f"is damaged at '{one_line(name)}': {error}") from error

    def failure(self, what: str) -> LoadError:
        """Return the error for the file, with the reason ``what``."""
        return LoadError(f"failed to load model '{self.model}': '{self.path}' {what}")

    def trust_required(self, found: str) -> LoadError:
        """Return the error for a file that needs trust, with the reason ``found``."""
        return self.failure(f"may do more than compute: {found}; {HOW_TO_TRUST}")

    def _find(self, name: str) -> zipfile.ZipInfo:
        if name not in self._records:
            raise self.failure(f"has no '{one_line(name)}'")
        return self._records[name]

    def _by_name(self, entries: Sequence[zipfile.ZipInfo]) -> Mapping[str, zipfile.ZipInfo]:
        """Return the entries by their names without the common folder."""
        roots = {entry.filename.partition("/")[0] for entry in entries if "/" in entry.filename}
        root = f"{roots.pop()}/" if len(roots) == 1 else ""
        found: dict[str, zipfile.ZipInfo] = {}
        for entry in entries:
            name = entry.filename
            if reason := why_path_leaves(name):
                raise self.failure(f"has an entry '{one_line(name)}' outside of itself: {reason}")
            short = name.removeprefix(root)
            if short in found:
                raise self.failure(f"has two entries '{one_line(name)}'")
            found[short] = entry
        return found

    def _require_kind(self) -> None:
        names = self._records
        if "archive_format" in names:
            return
        if "constants.pkl" in names:
            raise self.failure("is TorchScript: call it model.pt, and the platform 'pytorch_libtorch'")
        if "serialized_exported_program.json" in names:
            raise self.failure("is a program of an older PyTorch: export it again with PyTorch 2.8 or later")
        if "data.pkl" in names:
            raise self.failure("is a pickle of torch.save, which holds no program: use torch.export.save")
        raise self.failure(
            "is neither a program of torch.export nor a package of AOTInductor; it holds "
            f"{', '.join(one_line(name) for name in list(names)[:3]) or 'nothing'}"
        )

    def _require_sizes(self, entries: Sequence[zipfile.ZipInfo]) -> None:
        for entry in entries:
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                raise self.failure(f"has a compressed entry '{one_line(entry.filename)}', and PyTorch compresses none")
        if sum(entry.file_size for entry in entries) > self.path.stat().st_size:
            raise self.failure("has entries that overlap, larger in all than the file")

    def _require_format(self) -> None:
        if self.read("archive_format") != b"pt2":
            raise self.failure("is of another format than PyTorch's 'pt2'")
        order = self.read("byteorder") if "byteorder" in self._records else b"little"
        if order != b"little":
            raise self.failure(f"was written by a machine of another byte order, {one_line(order.decode('latin-1'))}")
        if not self.programs and not self.packages:
            raise self.failure("has neither a program of torch.export nor a library of AOTInductor")
