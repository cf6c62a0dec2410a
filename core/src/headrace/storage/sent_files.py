"""The content of a load request: another config, or all files of the model.

Source: docs/spec/behaviours.md section 5.4.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.config_json import parse_json
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.options import ServerOptions
from headrace.errors import InvalidArgument
from headrace.storage.base import Storage

#: The prefix of a load parameter that contains a file.
_FILE = "file:"


@dataclass(frozen=True, slots=True)
class Overrides:
    """``config`` replaces the config file. ``files`` replace the model's files, by path below its directory."""

    config: ModelConfig | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


def parse_overrides(parameters: Mapping[str, str | bytes]) -> Overrides:
    """Return the overrides in the parameters of a load. Raises `InvalidArgument` or `ConfigError`."""
    files = {}
    for name, value in parameters.items():
        if name.startswith(_FILE) and isinstance(value, bytes):
            files[_inside(name)] = value
        elif name != "config" or not isinstance(value, str):
            kind = "BYTES" if isinstance(value, bytes) else "STRING"
            raise InvalidArgument(f"Unrecognized load parameter '{name}' with type '{kind}'")
    config = parameters.get("config")
    if files and config is None:
        raise InvalidArgument("Load parameter 'config' must be specified for model file override")
    return Overrides(parse_json(config) if isinstance(config, str) else None, files)


def write_files(files: Mapping[str, bytes], model_path: Path) -> None:
    """Write ``files`` to the empty directory ``model_path``. Raises `InvalidArgument` with the file at fault."""
    for name, content in files.items():
        path = model_path / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except (FileExistsError, NotADirectoryError):
            text = f"Invalid file parameter '{_FILE}{name}', directory has been created as a file"
            raise InvalidArgument(text) from None
        except IsADirectoryError:
            raise InvalidArgument(f"Invalid file parameter '{_FILE}{name}', it is another's directory") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a file name"
            raise InvalidArgument(f"Invalid file parameter '{_FILE}{name}', cannot be written: {reason}") from error


def _inside(parameter: str) -> str:
    """Return the path in ``parameter``, relative to the model's directory. Raises if it is outside."""
    name = parameter.removeprefix(_FILE)
    path = posixpath.normpath(name.lstrip("/") or ".")  # as Triton: a leading slash is ignored
    if "\0" in name or path in (".", "..") or path.startswith("../"):
        shown = path.replace("\0", "\\0")
        raise InvalidArgument(
            f"Invalid file parameter '{parameter}' with normalized path '{shown}' must stay within model directory."
        )
    return path


class SentFiles(Storage):
    """The files of one model from a load request. It has no URL."""

    name = "load request"

    def __init__(self, model: str, files: Mapping[str, bytes], options: ServerOptions) -> None:
        super().__init__("", options)
        self._model, self._files = model, files
        self._tag = object()  # sent again, loaded again

    def models(self) -> Collection[str]:
        return (self._model,)

    def fingerprint(self, model: str) -> Mapping[str, Hashable]:
        return dict.fromkeys(self._files, self._tag)

    def fetch(self, model: str, files: Collection[str], new_directory: Callable[[], Path]) -> Path:
        directory = new_directory()
        write_files(self._files, directory)
        return directory
