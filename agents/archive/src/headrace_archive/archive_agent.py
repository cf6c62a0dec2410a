"""The repository agent ``archive``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from headrace import ConfigError, RepositoryAgent


class Archive(RepositoryAgent):
    """Unpacks the archive in the model's directory, beside copies of its other files."""

    name = "archive"

    def __init__(self, model: str, parameters: Mapping[str, str]) -> None:
        from headrace_archive.unpacking import ArchiveSettings

        super().__init__(model, parameters)
        self._who = f"agent 'archive' of model '{model}'"
        try:
            self._settings = ArchiveSettings.parse(parameters)
        except ConfigError as error:
            raise ConfigError(f"{self._who}: {error.message}") from error

    def load(self, directory: Path, new_directory: Callable[[], Path]) -> Path:
        from headrace_archive.unpacking import unpack

        return unpack(self._settings, self._who, directory, new_directory)
