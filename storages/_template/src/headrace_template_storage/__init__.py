"""The storage ``template`` for Headrace: model repositories in zip files, such as ``template:///srv/models.zip``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from zipfile import ZipFile

from headrace import ConfigError, ServerOptions, Storage, hookimpl


class Template(Storage):
    name = "template"

    def __init__(self, url: str, options: ServerOptions) -> None:
        super().__init__(url, options)
        self._path = Path(url.partition("://")[2])
        if not self._path.is_absolute():
            raise ConfigError(f"'{url}' does not say where the zip file is: template:///srv/models.zip does")

    def models(self) -> Collection[str]:
        with ZipFile(self._path) as archive:
            return {name.partition("/")[0] for name in archive.namelist() if "/" in name}

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        folder = f"{model}/"
        with ZipFile(self._path) as archive:
            files = [
                info for info in archive.infolist() if info.filename.startswith(folder) and info.filename != folder
            ]
        return {info.filename.removeprefix(folder): (info.CRC, info.file_size) for info in files}

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        directory = new_directory()
        with ZipFile(self._path) as archive:
            for file in files:
                target = directory / file
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(f"{model}/{file}") as source, target.open("wb") as written:
                    shutil.copyfileobj(source, written)
        return directory


@hookimpl
def register_storages() -> list[type[Storage]]:
    return [Template]
