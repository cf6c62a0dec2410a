"""Imports ONNX Runtime when the first model needs it, and opens its sessions by a model's config and parameters.

Source: docs/spec/behaviours.md section 10.2. Errors of the engine are reworded.
"""

from __future__ import annotations

import logging
import mmap
import os
import posixpath
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from headrace import ConfigError, Device, LoadError, Model, in_memory, one_line, open_regular
from headrace_engines import read_libraries, read_onnx_file, threads_per_instance
from headrace_onnx import providers

log = logging.getLogger("headrace.onnxruntime")

_CODE = re.compile(r"^\[ONNXRuntimeError\] : (\d+) : \w+ : ")
_BUILD_PATH = re.compile(r"(?<![^\s:])[^\s:]+\.(?:cc|cpp|cu|cuh|h|hpp):\d+ ")  # older engines write "failed:<path>"

#: The first version that accepts weights of all parts of a graph from memory; 1.24 fails for weights of branches.
_COPIES_WEIGHTS = (1, 31)

_pool_lock = threading.Lock()
_pool_sizes: tuple[int, int] | None = None
#: Values of ``optimization.graph.level``; every other value enables everything.
_GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}


class OpenedSession(NamedTuple):
    """An ``InferenceSession``. ``repeats`` is True if the time of an execution depends on the values of a request."""

    session: Any
    repeats: bool


def load_engine() -> Any:
    """Return the module ``onnxruntime``. Raises `LoadError` with the command that installs it.

    Some builds send usage data to their vendor, and keep a database for it in the home directory. This is switched off
    before the import, unless the environment sets it.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    read_libraries("onnxruntime", "capi")
    try:
        import onnxruntime
    except ImportError as error:
        raise LoadError(
            f"backend 'onnxruntime' needs the package onnxruntime, which cannot be imported ({error}); "
            "run: pip install onnxruntime (or onnxruntime-gpu)"
        ) from error
    return onnxruntime


def reword(error: BaseException) -> str:
    """Return the first line of an ONNX Runtime error, with its number and without build-machine paths.

    Worded as Triton words it: ``onnx runtime error 6: Non-zero status code returned ...``.
    """
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    code = _CODE.match(line)
    text = _BUILD_PATH.sub("", line[code.end() :] if code else line)
    return f"onnx runtime error {code[1]}: {text}" if code else f"onnx runtime error: {text}"


def open_session(onnxruntime: Any, model: Model, device: Device, options: Mapping[str, str]) -> OpenedSession:
    """Return a session that is ready to run on ``device``. ``options`` are the backend's.

    Raises `LoadError` naming the file at fault, or `ConfigError`.
    """
    session_options = _session_options(onnxruntime, model, options)
    chosen = providers.choose(onnxruntime, model, device)
    if device.kind == "gpu" and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # finds the CUDA libraries that pip has installed
    opened = _open(onnxruntime, model, session_options, chosen, copies_weights=True)
    active = opened.session.get_providers()
    for name, _ in chosen:
        if name not in active:
            raise LoadError(f"model '{model.name}': {name} could not be started; active are {', '.join(active)}")
    return opened


def open_unoptimized(onnxruntime: Any, model: Model, options: Mapping[str, str]) -> Any:
    """Return a session for reading the graph only, opened as fast as the engine can.

    ``model.parameters`` is not read: nothing in it changes the graph.
    """
    session_options = onnxruntime.SessionOptions()
    session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session_options.intra_op_num_threads = 1
    session_options.log_severity_level = 3  # warnings are logged by the real load
    if share_threads(onnxruntime, options):
        session_options.use_per_session_threads = False
    _register_libraries(session_options, model)
    return _open(onnxruntime, model, session_options, [(providers.CPU, {})]).session


def run_options(onnxruntime: Any, model: Model) -> Any:
    """Return the options of every ``Run`` of an instance. The engine's own error log is off: the response has the
    text."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    if model.parameters.arena_shrinkage:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", model.parameters.arena_shrinkage)
    return options


def _session_options(onnxruntime: Any, model: Model, backend_options: Mapping[str, str]) -> Any:
    parameters, options = model.parameters, onnxruntime.SessionOptions()
    level = _GRAPH_LEVELS.get(model.config.optimization.graph.level, "ORT_ENABLE_ALL")
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    modes = (onnxruntime.ExecutionMode.ORT_SEQUENTIAL, onnxruntime.ExecutionMode.ORT_PARALLEL)
    options.execution_mode = modes[parameters.execution_mode]
    options.enable_cpu_mem_arena = parameters.enable_mem_arena
    options.enable_mem_pattern = parameters.enable_mem_pattern
    if share_threads(onnxruntime, backend_options):
        options.use_per_session_threads = False
    else:
        threads = parameters.intra_op_thread_count or threads_per_instance(model.config, 2)
        log.info("model '%s', instance '%s': %d threads within an operator", model.name, model.instance_name, threads)
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = parameters.inter_op_thread_count
    for key, value in parameters.session.items():
        options.add_session_config_entry(key, value)
    if parameters.enable_profiling:
        options.enable_profiling = True
        options.profile_file_prefix = str(_profile(model, backend_options))
    _register_libraries(options, model)
    return options


def _profile(model: Model, backend_options: Mapping[str, str]) -> Path:
    """Return the prefix of a session's profile file; the engine adds the time and ``.json``.

    Raises `ConfigError` unless the operator has named a directory outside the model repository: a new file there would
    reload the model.
    """
    model.refuse_if_sent("'enable_profiling'")
    option = "profiling-directory"
    if not (directory := backend_options.get(option, "")):
        raise ConfigError(
            f"parameter 'enable_profiling' of model '{model.name}' needs a directory for its files: "
            f"--backend-config=onnxruntime,{option}=<directory>"
        )
    folder = Path(directory).resolve()
    if not folder.is_dir():
        raise ConfigError(f"backend option {option} of 'onnxruntime' is '{one_line(directory)}', which is no directory")
    if folder.is_relative_to(model.path.parent.parent.resolve()):
        raise ConfigError(
            f"backend option {option} of 'onnxruntime' is '{one_line(directory)}', in the model repository"
        )
    return folder / f"{model.instance_name}_{model.version}"


def _register_libraries(options: Any, model: Model) -> None:
    """Load the config's libraries of custom operators, from the version's directory or the model's.

    They are native code. Validation refuses absolute paths, and this function all paths of a config that was sent.
    """
    for library in model.config.model_operations.op_library_filename:
        model.refuse_if_sent("'op_library_filename'")
        path = model.resource_or_above(library)
        try:
            with in_memory(path):  # the dynamic loader reads it under the interpreter's lock
                options.register_custom_ops_library(str(path))
        except Exception as error:  # pybind has its own exception classes
            raise LoadError(f"unable to load model '{model.name}': '{path}': {reword(error)}") from error


def _open(
    onnxruntime: Any, model: Model, options: Any, chosen: providers.Providers, copies_weights: bool = False
) -> OpenedSession:
    """Return the session. With ``copies_weights``, copy weights in other files into memory instead of mapping them.

    If a mapped file is truncated while the model is served, the process crashes. Constants in branches and functions
    are still mapped; no known exporter writes these to files.
    """
    path = _file_of(model.file("model.onnx"))
    names, repeats = read_onnx_file(path, model.path.parent)
    with ExitStack() as opened:
        if copies_weights and names and _version(onnxruntime) >= _COPIES_WEIGHTS:
            contents = [opened.enter_context(_contents(model, path, name)) for name in names]
            options.add_external_initializers_from_files_in_memory(names, contents, [len(each) for each in contents])
        try:
            # The engine's own fallback would print to stdout and run on another device than configured.
            session = onnxruntime.InferenceSession(str(path), options, chosen, enable_fallback=0)
        except Exception as error:  # pybind has its own exception classes
            reason = reword(error).replace(f"Load model from {path} failed:", "")
            raise LoadError(f"unable to load model '{model.name}': '{path}': {reason}") from error
    return OpenedSession(session, repeats)


@contextmanager
def _contents(model: Model, path: Path, name: str) -> Iterator[Any]:
    """Yield the bytes of the file ``name`` beside ``path``, while a session is being opened."""
    file = path.parent / posixpath.normpath(name)
    try:
        with open_regular(file) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield content
    except ValueError:  # an empty file
        yield b""
    except OSError as error:
        raise LoadError(
            f"unable to load model '{model.name}': '{file}', which '{path.name}' names: {error.strerror}"
        ) from error


def _version(onnxruntime: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in onnxruntime.__version__.split(".")[:2] if part.isdecimal())


def _file_of(path: Path) -> Path:
    """Return the ONNX file: ``path``, or ``model.onnx`` in it if it is a directory.

    Raises `LoadError` naming the missing file.
    """
    if not path.is_dir():
        return path
    inner = path / "model.onnx"
    if not inner.is_file():
        raise LoadError(f"no file '{inner}': a model directory must hold model.onnx and its external data")
    return inner


def share_threads(onnxruntime: Any, options: Mapping[str, str]) -> bool:
    """Return True if all sessions of this process share one thread pool, and create it if needed.

    ``options`` are the backend's: ``enable-global-threadpool``, and the counts ``intra_op_thread_count`` and
    ``inter_op_thread_count``. Raises `ConfigError`.
    """
    if not _is_on(options, "enable-global-threadpool"):
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


def _is_on(options: Mapping[str, str], key: str) -> bool:
    text = options.get(key, "0").lower()
    if text not in ("0", "1", "false", "true"):
        raise ConfigError(f"backend option {key} of 'onnxruntime' must be true or false, got '{one_line(text)}'")
    return text in ("1", "true")
