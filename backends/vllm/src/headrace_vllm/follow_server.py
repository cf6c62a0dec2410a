"""A plugin of vLLM: the engine's process ends when the server's does, also if that is killed.

vLLM loads it in each of its processes, by the entry point group ``vllm.general_plugins``. Without it, the engine of a
server that was killed would live on, and keep its GPUs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

#: The environment variable with the process of the server. Without it, vLLM runs on its own.
SERVER: Final = "HEADRACE_VLLM_SERVER"
_PR_SET_PDEATHSIG: Final = 1


def follow_server() -> None:
    """Let the system kill this process when the thread that has started it ends. On Linux, in a child of the server;
    elsewhere this does nothing."""
    server = os.environ.get(SERVER, "")
    if sys.platform != "linux" or not server.isdigit() or os.getpid() == int(server):
        return
    if os.getppid() == int(server):  # not a worker, which ends with the engine
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(server):  # it has ended meanwhile
            os.kill(os.getpid(), signal.SIGKILL)
