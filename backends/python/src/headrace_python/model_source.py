"""Where the code of a model is: in its version's directory, or in that of its backend.

Source: docs/spec/behaviours.md sections 9.1 and 10.7.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace import LoadError
from headrace_python.instance_description import model_file

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
