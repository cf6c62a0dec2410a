"""What an instance is told about itself, wherever it runs, and where its code is.

The code is in the version's directory, or in that of the backend (docs/spec/behaviours.md sections 9.1 and 10.7).
"""

from __future__ import annotations

import json
import logging
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import DeviceKind, LoadError, Services, why_outside


@dataclass(frozen=True, slots=True)
class InstanceDescription:
    """One instance of a Python model.

    ``path`` is the version's directory and ``config`` the model's config as JSON, in the form of
    the ``/config`` endpoint. ``file`` is its ``model.py``, which a backend may share among its models;
    ``folders`` are where its imports are looked for, its own and the parent if empty.
    """

    name: str
    version: int
    path: Path
    file: Path
    config: str
    instance_name: str
    device_kind: DeviceKind = "cpu"
    device_id: int = 0
    services: Services | None = None
    folders: Sequence[Path] = ()

    def args(self) -> dict[str, str]:
        """What ``initialize`` is given (docs/spec/behaviours.md section 9.1)."""
        return {
            "model_config": self.config,
            "model_instance_kind": self.device_kind.upper(),
            "model_instance_name": self.instance_name,
            "model_instance_device_id": str(self.device_id),
            "model_repository": str(self.path.parent),
            "model_version": str(self.version),
            "model_name": self.name,
        }


def is_decoupled(config: dict[str, Any]) -> bool:
    """Whether the model answers through response senders only."""
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))


def model_file(path: Path, config: str) -> Path:
    """``default_model_filename`` in the version's directory ``path``, or ``model.py``.

    Raises `LoadError` if there is none, or if it is no Python file of the model's directory.
    """
    name = json.loads(config).get("default_model_filename") or "model.py"
    file = path / posixpath.normpath(name)  # not through a link and up again
    if not name.endswith(".py"):
        raise LoadError(f"Model name must end with '.py'. Model name is \"{name}\".")
    if not file.is_file():
        raise LoadError(f"Python model file not found in '{file}'")
    if reason := why_outside(name, levels=1):
        raise LoadError(f"Python model file '{name}' is outside the model directory: {reason}")
    return file


log = logging.getLogger("headrace.python")

#: The setting, as in Triton, that says where the directories of python-based backends are.
BACKENDS = "backend-directory"
RUNTIME = "model.py"


@dataclass(frozen=True, slots=True)
class Source:
    """``file`` has the class; ``folders`` are where its imports are looked for, the usual ones if empty."""

    file: Path
    folders: Sequence[Path] = ()


def find_source(path: Path, config: str, options: Mapping[str, str]) -> Source:
    """The code for the version in ``path``, by the model's config as JSON and its backend's settings.

    Raises `LoadError` if there is none, and says so in the log as Triton does.
    """
    try:
        return _found(path, config, options)
    except LoadError as error:
        log.error("Failed to preinitialize Python stub: %s", error)
        raise


def _found(path: Path, config: str, options: Mapping[str, str]) -> Source:
    settings = json.loads(config)
    name = settings.get("backend") or "python"
    if name == "python" or BACKENDS not in options:
        return Source(model_file(path, config))
    folder = Path(options[BACKENDS], name)
    file = folder / (settings.get("runtime") or RUNTIME)
    if file.suffix != ".py" or file.parent != folder or not file.is_file():
        raise LoadError(f"Python model file not found in '{file}'")
    return Source(file, (folder, path, path.parent))
