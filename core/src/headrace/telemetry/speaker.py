"""For which model a thread works, so that the log can name it. Threads of a model say so once."""

from __future__ import annotations

import threading

_local = threading.local()
#: Of every thread, in a process that has one model only.
_of_process = ""


def speak_for(model: str) -> None:
    """What this thread says from now on, it says for ``model``."""
    _local.model = model


def speak_for_all(model: str) -> None:
    """What this process says from now on, it says for ``model``, unless one of its threads has said otherwise."""
    global _of_process
    _of_process = model


def speaker() -> str:
    """The model for which this thread speaks; empty if it is none."""
    model: str = getattr(_local, "model", _of_process)
    return model
