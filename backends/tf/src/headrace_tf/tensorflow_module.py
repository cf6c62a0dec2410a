"""TensorFlow itself, imported when the first model needs it, and its errors in our words."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from typing import Any

from headrace import LoadError, one_line, paced

log = logging.getLogger("headrace.tensorflow")

#: Its own lines about each operator that fails are warnings, and callers cause them: what failed is in the answer.
_ERRORS_ONLY = "2"
#: Lets ``optimization.graph.level`` turn XLA on for a session on the CPU; without such a level it changes nothing.
_XLA_ON_CPU = "--tf_xla_cpu_global_jit"

_NODE = re.compile(r"\{\{node ([^}]*)\}\}")
_lock = threading.Lock()


def load_engine() -> Any:
    """The module ``tensorflow``; raises `LoadError` saying how to install it. Any thread; takes seconds once."""
    with _lock:
        if "tensorflow" in sys.modules:
            return sys.modules["tensorflow"]
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", _ERRORS_ONLY)
        flags = os.environ.get("TF_XLA_FLAGS", "")
        if _XLA_ON_CPU not in flags:
            os.environ["TF_XLA_FLAGS"] = f"{flags} {_XLA_ON_CPU}".strip()
        try:
            import tensorflow
        except ImportError as error:
            raise LoadError(
                "backend 'tensorflow' needs the package tensorflow, which cannot be imported "
                f"({one_line(str(error))}); run: pip install tensorflow-cpu (or tensorflow[and-cuda] for GPUs)"
            ) from error
        # Its logger writes to stderr by a handler of its own; the server's log has what it says, in bounds.
        logger = paced("tensorflow")
        for handler in tuple(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
        return tensorflow


def reword(error: BaseException) -> str:
    """The first line of a TensorFlow error, and the node that it concerns."""
    text = str(getattr(error, "message", "") or error).strip() or type(error).__name__
    line = one_line(text.splitlines()[0])
    node = _NODE.search(text)
    return line if node is None or node[1] in line else f"{line} (node '{node[1]}')"
