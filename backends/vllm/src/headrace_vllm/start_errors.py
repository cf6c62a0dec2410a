"""Why an engine does not start: the errors of its processes.

vLLM writes them to the log only, and raises "Engine core initialization failed. See root cause above". So
`note_errors`, a plugin of vLLM (entry point group ``vllm.general_plugins``), writes those of each process to a file,
too, which the server reads.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from headrace import one_line

#: The environment variable with the file.
FILE: Final = "HEADRACE_VLLM_START_ERRORS"
#: An engine that has started goes on to write, to a file that has no name any more: until it has this many bytes.
_MOST_BYTES: Final = 1 << 16
_MOST_CHARACTERS: Final = 500
#: vLLM's errors that refer to an error of another process.
_REFERENCE: Final = "root cause"
_NO_CAUSE: Final = "A process ended without an error: Linux kills one if memory runs out"


class StartErrors:
    """The errors of the processes that start meanwhile, in ``file``, a line each."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def cause_of(self, error: Exception) -> str:
        """Return the cause of ``error``, with which an engine does not start, in one line."""
        noted = self._file.read_text(errors="replace").splitlines()
        if causes := [line for line in noted if _REFERENCE not in line]:
            return causes[-1]
        text = noted[-1] if noted else one_line(str(error)) or type(error).__name__
        return f"{text}. {_NO_CAUSE}" if _REFERENCE in text else text


@contextmanager
def collected_errors() -> Iterator[StartErrors]:
    """Collect the errors of vLLM's processes that start in the block. Not in two threads at once."""
    descriptor, name = tempfile.mkstemp(prefix="headrace-vllm-")
    os.close(descriptor)
    os.environ[FILE] = name
    try:
        yield StartErrors(Path(name))
    finally:
        del os.environ[FILE]
        Path(name).unlink()


def note_errors() -> None:
    """Write the errors that this process logs to the file of the server. Without a file, do nothing."""
    logger = logging.getLogger("vllm")
    if any(isinstance(each, _ErrorFile) for each in logger.handlers):
        return
    with suppress(OSError, KeyError):  # the engine has started meanwhile, or vLLM runs on its own
        logger.addHandler(_ErrorFile(os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND)))


class _ErrorFile(logging.Handler):
    """Writes the exception of each record that has one to ``descriptor``, as one line."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(logging.ERROR)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and os.fstat(self._descriptor).st_size < _MOST_BYTES:
            text = f"{type(error).__name__}: {one_line(str(error))[:_MOST_CHARACTERS]}\n"
            os.write(self._descriptor, text.encode(errors="replace"))
