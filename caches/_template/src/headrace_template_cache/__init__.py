"""The response cache ``template`` for Headrace: answers as files in a folder, of which the oldest go first."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace import CachedResponse, PublishedMetric, ResponseCache, hookimpl, pack_response, unpack_response


@dataclass(frozen=True, slots=True)
class Settings:
    path: str = ""  #: the folder, which is this cache's own
    most: int = 1000  #: answers that it has at most

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("'path', the folder for the answers, must be given")


class Template(ResponseCache):
    name = "template"
    Parameters = Settings
    is_remote = True  # a disk may be slow: it is read on threads, and its entries are checked
    threads = 4
    metrics = (PublishedMetric("headrace_template_answers", "Number of answers in the folder"),)

    def __init__(self, parameters: Settings) -> None:
        super().__init__(parameters)
        self._folder, self._most = Path(parameters.path), parameters.most
        self._folder.mkdir(parents=True, exist_ok=True)
        found = sorted(self._folder.glob("*.answer"), key=lambda path: path.stat().st_mtime)
        self._paths = dict.fromkeys(found)  # oldest first
        self._changing = threading.Lock()

    def get(self, key: bytes) -> CachedResponse | None:
        try:
            return unpack_response(self._path(key).read_bytes())
        except FileNotFoundError:
            return None

    def put(self, key: bytes, response: CachedResponse) -> None:
        path = self._path(key)
        written = path.with_suffix(f".{threading.get_ident()}")
        written.write_bytes(pack_response(response))
        written.replace(path)  # no reader gets half an answer
        with self._changing:
            self._paths[path] = None
            evicted = list(self._paths)[: max(0, len(self._paths) - self._most)]
            for old in evicted:
                del self._paths[old]
        for old in evicted:
            old.unlink(missing_ok=True)

    def measure(self) -> Mapping[str, float]:
        return {"headrace_template_answers": len(self._paths)}

    def _path(self, key: bytes) -> Path:
        return self._folder / f"{key.hex()}.answer"


@hookimpl
def register_caches() -> list[type[ResponseCache]]:
    return [Template]
