"""Imports PyTorch when the first model needs it, and makes its settings for the whole process."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace import ConfigError, Device, LoadError, Model, one_line
from headrace_engines import import_environment, read_libraries, set_torch_threads, threads_beside_server
from headrace_torch.pinned_memory import PinnedArrays

log = logging.getLogger("headrace.pytorch")

_lock = threading.Lock()
_capturing = threading.Lock()
_is_ready = False
_pool: PinnedArrays | None = None
_PINNED_BYTES, _DEFAULT_PINNED_BYTES = "pinned-memory-pool-byte-size", "268435456"


def load_engine() -> Any:
    """Return the module ``torch``. Raises `LoadError` with the command that installs it."""
    read_libraries("torch", "lib")
    try:
        with import_environment():
            import torch
    except ImportError as error:
        raise LoadError(
            f"backend 'pytorch' needs the package torch, which cannot be imported ({error}); run: pip install torch"
        ) from error
    global _is_ready
    with _lock:
        if not _is_ready:
            _suppress_input_warning(torch)
            _is_ready = True
    return torch


def _suppress_input_warning(torch: Any) -> None:
    """Provoke, and ignore, PyTorch's warning about tensors on read-only arrays, which it issues once per process.

    Inputs are such arrays. `TensorConverter` copies them for a model that may write to them.
    """
    array = np.zeros(1, np.float32)
    array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.from_numpy(array)


def device_of(torch: Any, model: Model) -> str:
    """Return PyTorch's name of ``model.device``; ``cpu`` if the model chooses its device.

    Raises `LoadError` for a GPU that does not exist."""
    device: Device = model.device
    if device.kind != "gpu":
        return "cpu"
    if not torch.cuda.is_available() or device.id >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise LoadError(
            f"model '{model.name}': instance '{model.instance_name}' is to run on GPU {device.id}, but PyTorch "
            f"{torch.__version__} finds {count} GPUs"
        )
    return f"cuda:{device.id}"


def not_capturing() -> threading.Lock:
    """Return the lock for operations that CUDA forbids while another thread captures a graph.

    These are other captures, and waits for a whole GPU.
    """
    return _capturing


def release_gpu_memory() -> None:
    """Return PyTorch's free memory of every GPU to the driver. Any thread.

    Modules may be part of reference cycles, so garbage is collected first, which blocks all threads for up to 90 ms.
    Does nothing if no model has used a GPU.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        gc.collect()
        with _capturing:
            torch.cuda.empty_cache()


def pinned_pool(torch: Any, options: Mapping[str, str]) -> PinnedArrays:
    """Return the pool of this process. Its size is in the backend's ``options`` when a model first needs it.

    Raises `ConfigError` for a size that is no number."""
    global _pool
    with _lock:
        if _pool is None:
            text = options.get(_PINNED_BYTES, _DEFAULT_PINNED_BYTES)
            if not text.isdecimal():
                raise ConfigError(
                    f"backend option {_PINNED_BYTES} of 'pytorch' must be a number of bytes, 0 for none, not "
                    f"'{one_line(text)[:100]}'"
                )
            _pool = PinnedArrays(int(text), partial(_pinned, torch))
    return _pool


def _pinned(torch: Any, size: int) -> npt.NDArray[np.uint8]:
    memory: npt.NDArray[np.uint8] = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


def set_threads(torch: Any, model: Model, default_instances: int) -> None:
    """Set the threads within an operator for the calling thread, and those across operators for the process.

    By default, each instance gets an equal share of the cores for threads within an operator.
    """
    count = model.parameters.threads_within or threads_beside_server(model.config, default_instances)
    set_torch_threads(torch, count)
    log.info("model '%s', instance '%s': %d threads within an operator", model.name, model.instance_name, count)
    across = model.parameters.threads_across
    if across and across != torch.get_num_interop_threads():
        try:
            torch.set_num_interop_threads(across)
        except RuntimeError:
            log.warning(
                "model '%s': the threads across operators stay at %d, not %d: another model has begun to run",
                model.name,
                torch.get_num_interop_threads(),
                across,
            )


def use_one_thread(torch: Any) -> None:
    """Make operators that the calling thread runs use no other threads. For the event loop, which runs short
    executions."""
    if torch.get_num_threads() != 1:
        set_torch_threads(torch, 1)


#: TorchScript's settings for the whole process, and the function that changes each. Source: Triton's backend.
_JIT = {
    "ENABLE_JIT_EXECUTOR": ("enable_jit_executor", "_jit_set_profiling_executor"),
    "ENABLE_JIT_PROFILING": ("enable_jit_profiling", "_jit_set_profiling_mode"),
    "ENABLE_TENSOR_FUSER": ("enable_tensor_fuser", "_jit_set_texpr_fuser_enabled"),
}
_jit_chosen: dict[str, bool] = {}


def set_jit(torch: Any, model: Model) -> None:
    """Set how TorchScript runs in this process. The first model that has a setting decides."""
    for key, (field, setter) in _JIT.items():
        configured = getattr(model.parameters, field)
        if configured is None:
            continue
        with _lock:
            if key not in _jit_chosen:
                _jit_chosen[key] = configured
                getattr(torch._C, setter)(configured)
        if _jit_chosen[key] is not configured:
            log.warning(
                "model '%s': %s stays %s, as another model has set it for the whole process",
                model.name,
                key,
                str(not configured).lower(),
            )


def first_line(error: BaseException) -> str:
    """Return the text of a PyTorch error without its stack: the last line that is not part of TorchScript's trace."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("RuntimeError:")]
    text = errors[-1].removeprefix("RuntimeError: ") if errors else next(iter(lines), type(error).__name__)
    return text[:1000]
