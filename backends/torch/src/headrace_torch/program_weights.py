"""The parameters, buffers and constants of a program, read from their records: numbers, and never a pickle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace import one_line
from headrace_torch.program_check import Distrusted
from headrace_torch.program_signature import SCALAR_TYPES
from headrace_torch.pt2_archive import Pt2Archive


class ProgramWeights:
    """Reads ``weights`` and ``constants`` of the program ``name``; tensors with one record share memory.

    Raises `Distrusted` for pickled tensors and for objects, which ``torch.export.load`` would unpickle."""

    def __init__(self, torch: Any, archive: Pt2Archive, name: str) -> None:
        self._torch, self._archive = torch, archive
        self._entries: dict[str, Mapping[str, Any]] = {}
        for folder in ("weights", "constants"):
            if f"data/{folder}/{name}.pt" in archive.names(f"data/{folder}/"):
                raise Distrusted(f"its '{folder}' are one pickle")
            self._entries[folder] = archive.document(f"data/{folder}/{name}_{folder}_config.json")["config"]
            for tensor, entry in self._entries[folder].items():
                if entry["use_pickle"] or entry["tensor_meta"] is None:
                    raise Distrusted(f"its '{one_line(tensor)[:200]}' is a pickle")
        self._records: dict[str, Any] = {}

    def read(self, folder: str, name: str, device: str) -> Any:
        """Return one tensor, on ``device``."""
        entry = self._entries[folder].get(name)
        if entry is None:
            raise ValueError(f"it has no '{name[:200]}' in its {folder}")
        meta = entry["tensor_meta"]
        dtype = getattr(self._torch, SCALAR_TYPES[meta["dtype"]][0])
        sizes, strides = ([int(size["as_int"]) for size in meta[key]] for key in ("sizes", "strides"))
        elements = self._elements(f"data/{folder}/{entry['path_name']}", dtype)
        if not elements.numel():
            if 0 not in sizes:
                raise ValueError(f"its '{name[:200]}' of {sizes} has no content")
            return self._torch.empty(sizes, dtype=dtype, device=device)
        tensor = elements.as_strided(sizes, strides, int(meta["storage_offset"]["as_int"]))
        return tensor if device == "cpu" else tensor.to(device)

    def _elements(self, record: str, dtype: Any) -> Any:
        if record not in self._records:
            content = self._torch.empty(self._archive.size(record), dtype=self._torch.uint8)
            if content.numel():
                self._archive.read_into(record, memoryview(content.numpy()))
            self._records[record] = content
        return self._records[record].view(dtype)
