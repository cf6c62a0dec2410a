"""transformers itself, imported when the first model needs it, and the versions of it that this backend supports."""

from __future__ import annotations

from typing import Any, Final

from headrace import LoadError
from headrace_engines import check_engine_version, import_environment, read_libraries

#: From the first version up to, and without, the second. Parts of continuous batching that this backend replaces are
#: internal to transformers.
SUPPORTED: Final = ((5, 17), (5, 25))
#: Environment variables that transformers reads when it is imported.
_ENVIRONMENT: Final = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def load_engine() -> Any:
    """Return the module ``transformers``.

    Raises `LoadError` with the command that installs it, or with the versions that are supported.
    """
    read_libraries("torch", "lib")
    try:
        with import_environment(_ENVIRONMENT):
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


def check_version(version: str) -> None:
    """Raise `LoadError`, with both, if ``version`` of transformers is not supported."""
    check_engine_version("transformers", "transformers", version, SUPPORTED, f"pip install {_requirement()}")


def _requirement() -> str:
    least, below = (".".join(map(str, version)) for version in SUPPORTED)
    return f"'transformers>={least},<{below}'"
