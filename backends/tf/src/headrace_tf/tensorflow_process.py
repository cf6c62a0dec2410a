"""Import TensorFlow when the first model needs it, and keep its settings for the whole process: threads, operators,
visible GPUs. Its errors are reworded.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from headrace import Device, LoadError, Model, ModelInstanceGroup, one_line, rate_limited_logger
from headrace_engines import read_libraries

log = logging.getLogger("headrace.tensorflow")

#: TensorFlow logs a warning for each operator that fails, which callers can cause. The response has the error.
_ERRORS_ONLY = "2"
#: Needed so that ``optimization.graph.level`` can turn XLA on for the CPU. Without a level it has no effect.
_XLA_ON_CPU = "--tf_xla_cpu_global_jit"

#: TensorFlow's text about an unknown operator: the name of the machine, and advice for TensorFlow 1.
_HOST = re.compile(r" in binary running on \S+\. Make sure .*")
_NODE = re.compile(r"\{\{node ([^}]*)\}\}")
_import_lock = threading.Lock()
_threads_lock = threading.Lock()
_threads_of_process: int | None = None


def load_engine() -> Any:
    """Return the module ``tensorflow``. Any thread. The first call takes seconds.

    It sets environment variables that TensorFlow reads during its import, unless they are set. Raises `LoadError` with
    the command that installs TensorFlow.
    """
    with _import_lock:
        if "tensorflow" in sys.modules:
            return sys.modules["tensorflow"]
        read_libraries("tensorflow", "", "python")
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
        # Its logger has a handler for stderr. The server's log gets its lines instead, rate-limited.
        logger = rate_limited_logger("tensorflow")
        for handler in tuple(logger.handlers):
            logger.removeHandler(handler)
        logger.propagate = True
        return tensorflow


def reword(error: BaseException) -> str:
    """Return the first line of a TensorFlow error, and the node that it concerns."""
    text = str(getattr(error, "message", "") or error).strip() or type(error).__name__
    line = one_line(_HOST.sub("", text.splitlines()[0]))
    node = _NODE.search(text)
    return line if node is None or node[1] in line else f"{line} (node '{node[1]}')"


def device_of(tensorflow: Any, model: Model) -> Device:
    """Return the real device of an instance: the CPU if no group requires GPUs and TensorFlow finds none.

    Raises `LoadError` for a required GPU that is missing.
    """
    if model.device.kind != "gpu" or model.device.id < len(tensorflow.config.list_physical_devices("GPU")):
        return model.device
    if any(group.kind == ModelInstanceGroup.KIND_GPU for group in model.config.instance_group):
        raise LoadError(
            f"model '{model.name}' needs GPU {model.device.id}, which TensorFlow {tensorflow.__version__} does not "
            "see; run: pip install 'tensorflow[and-cuda]'"
        )
    log.warning("instance '%s' runs on the CPU: TensorFlow sees no GPU", model.instance_name)
    return Device("cpu")


def threads_of_process(configured: int, default: int, model: str) -> int:
    """Return the thread count of the process: set by its first model, or its ``default`` for 0.

    TensorFlow creates the threads of its operators once.
    """
    global _threads_of_process
    with _threads_lock:
        if _threads_of_process is None:
            _threads_of_process = configured or default
            log.info(
                "model '%s': TensorFlow runs the operators of all models on %d threads", model, _threads_of_process
            )
        elif configured not in (0, _threads_of_process):
            log.warning(
                "model '%s': TF_NUM_INTRA_THREADS stays at %d, not %d: another model was loaded before",
                model,
                _threads_of_process,
                configured,
            )
        return _threads_of_process


def has_xla_on_cpu() -> bool:
    """True if XLA was allowed to run on the CPU before TensorFlow was imported."""
    return _XLA_ON_CPU in os.environ.get("TF_XLA_FLAGS", "")


def registered_operators() -> Mapping[str, bool]:
    """Map the registered operators, with those of libraries, to True if they have state."""
    from tensorflow.core.framework import op_def_pb2
    from tensorflow.python.client import pywrap_tf_session

    buffer = pywrap_tf_session.TF_GetAllOpList()
    listed = op_def_pb2.OpList.FromString(pywrap_tf_session.TF_GetBuffer(buffer))
    return {each.name: each.is_stateful for each in listed.op}


@cache
def own_operators() -> Mapping[str, bool]:
    """Return TensorFlow's own operators. The first call must precede the load of any library."""
    return registered_operators()
