"""The title of a model's process in the process list: Triton's, which scripts search for."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

#: The title of Triton's process of a Python model.
_NAME = b"triton_python_backend_stub"
_PR_SET_NAME = 15
#: The fields of ``/proc/self/stat``, after the name in parentheses, with the first and the last address of the command
#: line.
_ARG_START, _ARG_END = 45, 46


def show_as_stub() -> None:
    """Set the process title to Triton's name, followed by its own arguments.

    Does nothing outside Linux, or if the command line is too short.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_NAME, _NAME, 0, 0, 0)  # the kernel keeps 15 characters
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[_ARG_START]), int(fields[_ARG_END])
    _, _, rest = Path("/proc/self/cmdline").read_bytes().split(b"\0", 2)  # the interpreter, our first program, and ours
    title = b"\0".join((_NAME, rest.rstrip(b"\0")))
    if start and len(title) < end - start:
        ctypes.memmove(start, title.ljust(end - start - 1) + b"\0", end - start)
