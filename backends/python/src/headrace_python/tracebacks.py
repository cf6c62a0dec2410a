"""What a caller is told about an exception of a model: the text that Triton gives.

Triton's Python backend is built on pybind11, so the form is that of pybind11's
``error_already_set``: the type and the message, then the frames, innermost first::

    ValueError: bad value

    At:
      1/model.py(12): helper
      1/model.py(30): execute

Triton gives whole paths. Here callers are told files from the model's directory on, and `headrace.frontends.disclosure`
sees to the rest; the log, and the callers of a verbose server, get whole paths.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from types import CodeType

_LOG = logging.getLogger("headrace")

#: Frames of a message; a recursion without end has a thousand.
MAX_FRAMES = 24
#: Characters of an exception's own message. What is cut off is in the log.
MAX_MESSAGE = 2048

#: Top-level packages whose frames say nothing about the model: who called it, and who imported it.
_OURS = frozenset(("importlib", "headrace", "headrace_python", "triton_python_backend_utils"))


def describe(error: BaseException, model: str = "") -> str:
    """``error`` with its frames in the model's code, in the form above.

    Files below the directory ``model`` are named from there, unless the log is verbose.
    """
    text = f"{type(error).__name__}: {_message(error)}"
    home = "" if not model or _LOG.isEnabledFor(logging.DEBUG) else f"{model.rstrip('/')}/"
    frames = [f"  {code.co_filename.removeprefix(home)}({line}): {code.co_name}\n" for code, line in _frames(error)]
    frames.reverse()
    if len(frames) > MAX_FRAMES:
        frames[MAX_FRAMES:] = [f"  ... {len(frames) - MAX_FRAMES} more\n"]
    return f"{text}\n\nAt:\n{''.join(frames)}" if frames else text


def _message(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        return "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
    if len(text) > MAX_MESSAGE:
        text = f"{text[:MAX_MESSAGE]}... ({len(text) - MAX_MESSAGE} more characters)"
    return text or "<EMPTY MESSAGE>"


def _frames(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if module not in _OURS:
            yield frame.f_code, line
