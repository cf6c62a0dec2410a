"""Convert TorchServe's ``.mar``: a zip file with a manifest, a handler, and a serialized model.

Source: the manifest of ``torch-model-archiver`` (``MAR-INF/MANIFEST.json``). The model itself is taken over. The
handler is not: it is code for TorchServe's own interface, and turns other data into tensors. Clients send tensors to
Headrace.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from headrace import one_line
from headrace_archive.members import ArchiveMember, RefusedArchive, shown

log = logging.getLogger(__name__)

MANIFEST = "MAR-INF/MANIFEST.json"
_MANIFEST_BYTES = 1 << 20
#: The names by which the backends find a serialized model. TorchScript and weights have several suffixes in TorchServe.
_SERIALIZED = {".onnx": "model.onnx", ".pt2": "model.pt2", ".safetensors": "model.safetensors"}


@dataclass(frozen=True, slots=True)
class TorchServeArchive:
    """A manifest: ``renamed`` has the new names of files, and ``left_out`` the reasons for omitted ones."""

    renamed: dict[str, str]
    left_out: dict[str, str]

    @classmethod
    def parse(cls, content: bytes) -> TorchServeArchive:
        """Raises `RefusedArchive`."""
        model = _model_of(content)
        serialized, module = model("serializedFile"), model("modelFile")
        if not serialized:
            raise RefusedArchive(
                f"{MANIFEST} names no serializedFile: the model is in its handler, which only TorchServe can run"
            )
        renamed = {serialized: _SERIALIZED.get(PurePosixPath(serialized).suffix, "model.pt")}
        if module:
            renamed[module] = "model.py"
        left_out = {
            MANIFEST: "it was read",
            model("handler").partition(":")[0]: "the handler is TorchServe's: clients send the tensors of the model",
            model("requirementsFile"): "nothing is installed: the environment of the server must have these packages",
            model("configFile"): "settings of TorchServe: set batching and instances in config.pbtxt",
        }
        return cls(renamed, {name: why for name, why in left_out.items() if name and name not in renamed})

    def name_of(self, name: str) -> str | None:
        """Return the new name of the member ``name``; None if it is left out."""
        if name in self.left_out or name.startswith("MAR-INF/"):
            return None
        return self.renamed.get(name, name)

    def explain(self, names: set[str], who: str, version: str) -> None:
        """Log what becomes of each file.

        Raises `RefusedArchive` if the archive, which has ``names``, lacks the model.
        """
        for name, new in self.renamed.items():
            if name not in names:
                raise RefusedArchive(f"{MANIFEST} names '{shown(name)}', which the archive does not have")
            log.info("%s: '%s' is '%s/%s'", who, one_line(name), version, new)
        for name, why in self.left_out.items():
            log.info("%s: '%s' is left out: %s", who, one_line(name), why)
        for name in sorted(names - self.renamed.keys() - self.left_out.keys()):
            log.info("%s: '%s' is '%s/%s', as it is", who, one_line(name), version, one_line(name))


def read_manifest(members: Iterator[ArchiveMember]) -> TorchServeArchive:
    """Return the content of the manifest among ``members``. Raises `RefusedArchive`."""
    for member in members:
        if member.name == MANIFEST and member.content is not None:
            content = member.content.read(_MANIFEST_BYTES)
            if member.content.read(1):
                raise RefusedArchive(f"{MANIFEST} has more than {_MANIFEST_BYTES} bytes")
            return TorchServeArchive.parse(content)
    raise RefusedArchive(f"it has no {MANIFEST}: torch-model-archiver has not written it")


def _model_of(content: bytes) -> Any:
    """Return a function that returns a field of the manifest's model as text, empty if there is none."""
    try:
        manifest = json.loads(content)
    except (ValueError, RecursionError):
        manifest = None
    model = manifest.get("model") if isinstance(manifest, dict) else None
    if not isinstance(model, dict):
        raise RefusedArchive(f"{MANIFEST} is damaged: expected a JSON object with an object 'model'")

    def field(name: str) -> str:
        value = model.get(name, "")
        if not isinstance(value, str):
            raise RefusedArchive(f"{MANIFEST}: '{name}' of 'model' is no string")
        return value

    return field
