"""ONNX Runtime itself: imported when the first model needs it, with errors in our words."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace import ConfigError, LoadError

log = logging.getLogger("headrace.onnxruntime")

_CODE = re.compile(r"^\[ONNXRuntimeError\] : (\d+) : \w+ : ")
_BUILD_PATH = re.compile(r"(?<!\S)\S+\.(?:cc|cpp|cu|cuh|h|hpp):\d+ ")

_pool_lock = threading.Lock()
_pool_sizes: tuple[int, int] | None = None


def load_engine() -> Any:
    """The module ``onnxruntime``; raises `LoadError` saying how to install it."""
    try:
        import onnxruntime
    except ImportError as error:
        raise LoadError(
            f"backend 'onnxruntime' needs the package onnxruntime, which cannot be imported ({error}); "
            "run: pip install onnxruntime (or onnxruntime-gpu)"
        ) from error
    return onnxruntime


def reword(error: BaseException) -> str:
    """The first line of an ONNX Runtime error, with its number and without build-machine paths.

    Worded as Triton words it: ``onnx runtime error 6: Non-zero status code returned ...``.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    code = _CODE.match(line)
    text = _BUILD_PATH.sub("", line[code.end() :] if code else line)
    return f"onnx runtime error {code[1]}: {text}" if code else f"onnx runtime error: {text}"


def file_of(path: Path) -> Path:
    """The ONNX file itself: ``path``, or ``model.onnx`` inside it if it is a directory.

    Raises `LoadError` naming the missing file.
    """
    if not path.is_dir():
        return path
    inner = path / "model.onnx"
    if not inner.is_file():
        raise LoadError(f"no file '{inner}': a model directory must hold model.onnx and its external data")
    return inner


def share_threads(onnxruntime: Any, options: Mapping[str, str]) -> bool:
    """Whether all sessions of this process use one thread pool, made now if it is not there yet.

    ``options`` are the backend's: ``enable-global-threadpool`` 0 or 1, and the counts
    ``intra_op_thread_count`` and ``inter_op_thread_count``. Raises `ConfigError`.
    """
    if _number(options, "enable-global-threadpool", 0) == 0:
        return False
    sizes = (_number(options, "intra_op_thread_count", 0), _number(options, "inter_op_thread_count", 0))
    global _pool_sizes
    with _pool_lock:
        if _pool_sizes is None:
            _make_pool(onnxruntime, sizes)
            _pool_sizes = sizes
        elif _pool_sizes != sizes:
            log.warning("the global thread pool of ONNX Runtime stays at %s threads, not %s", _pool_sizes, sizes)
    return True


def available_cores() -> int:
    """Cores that this process may use: its CPU affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def default_max_batch_size(options: Mapping[str, str]) -> int:
    """``--backend-config=onnxruntime,default-max-batch-size=N``; 4 unless set (docs/spec/behaviours.md section 4.3)."""
    if "default-max-batch-size" not in options:
        log.debug("Adding default backend config setting: default-max-batch-size,4")
    return max(0, _number(options, "default-max-batch-size", 4))


def _make_pool(onnxruntime: Any, sizes: tuple[int, int]) -> None:
    make = getattr(onnxruntime, "set_global_thread_pool_sizes", None)
    if make is None:
        raise ConfigError(
            f"backend option enable-global-threadpool needs a newer onnxruntime than {onnxruntime.__version__}: "
            "its Python package cannot make a global thread pool"
        )
    try:
        make(*sizes)
    except Exception as error:  # pybind raises RuntimeError or a class of its own
        raise ConfigError(f"backend option enable-global-threadpool: {reword(error)}") from error


def _number(options: Mapping[str, str], key: str, default: int) -> int:
    text = options.get(key, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"backend option {key} of 'onnxruntime' must be a whole number, got '{text}'") from None
