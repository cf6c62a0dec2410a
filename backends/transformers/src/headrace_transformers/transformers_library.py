"""transformers itself, imported when the first model needs it, and the versions of it that this backend supports."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from headrace import LoadError, one_line
from headrace_engines import read_libraries

#: From the first version up to, and without, the second. Parts of continuous batching that this backend replaces are
#: internal to transformers.
SUPPORTED: Final = ((5, 17), (5, 25))
#: Set while transformers is imported. OpenMP's threads sleep while they wait for each other, instead of taking the
#: cores from the event loop.
_ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_WAIT_POLICY": "passive"}
_lock = threading.Lock()


def load_engine() -> Any:
    """Return the module ``transformers``.

    Raises `LoadError` with the command that installs it, or with the versions that are supported.
    """
    read_libraries("torch", "lib")
    try:
        with _lock, _environment():
            import torch  # noqa: F401
            import transformers
            import transformers.models.auto
    except ImportError as error:
        raise LoadError(
            f"backend 'transformers' needs the packages torch and transformers, which cannot be imported ({error}); "
            f"run: pip install torch {_requirement()}"
        ) from error
    check_version(str(transformers.__version__))
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextmanager
def _environment() -> Iterator[None]:
    """Set what transformers reads when it is imported; other engines and child processes do not get it."""
    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def check_version(version: str) -> None:
    """Raise `LoadError`, with both, if ``version`` of transformers is not supported."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else None
    least, below = SUPPORTED
    if found is None or not least <= found < below:
        raise LoadError(
            f"transformers {one_line(version)} is installed; backend 'transformers' supports versions from "
            f"{least[0]}.{least[1]} up to, and without, {below[0]}.{below[1]}; run: pip install {_requirement()}"
        )


def _requirement() -> str:
    least, below = (".".join(map(str, version)) for version in SUPPORTED)
    return f"'transformers>={least},<{below}'"
