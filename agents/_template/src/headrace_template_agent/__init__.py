"""The repository agent ``template`` for Headrace: models packed as zip archives, unpacked when they are loaded."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace import ConfigError, LoadError, RepositoryAgent, hookimpl, why_path_leaves


class Template(RepositoryAgent):
    name = "template"

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        super().__init__(model, parameters)
        self._archive = parameters.get("archive", "model.zip")
        if reason := why_path_leaves(self._archive):
            raise ConfigError(f"agent 'template' of model '{model}': archive '{self._archive}': {reason}")

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        unpacked = new_directory()
        try:
            with zipfile.ZipFile(directory / self._archive) as archive:
                archive.extractall(unpacked)
        except zipfile.BadZipFile as error:
            raise LoadError(f"'{self._archive}' of model '{self.model}' cannot be unpacked: {error}") from error
        return unpacked


@hookimpl
def register_agents() -> list[type[RepositoryAgent]]:
    return [Template]
