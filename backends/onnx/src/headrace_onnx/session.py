"""From a model's config and parameters to an ONNX Runtime session (docs/spec/behaviours.md section 10.2)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from headrace import Device, LoadError, Model, ModelConfig, ModelInstanceGroup
from headrace_onnx import providers, references
from headrace_onnx.engine import available_cores, file_of, reword, share_threads

#: Values of ``optimization.graph.level``; every other value enables everything.
_GRAPH_LEVELS = {-1: "ORT_ENABLE_BASIC", 1: "ORT_ENABLE_EXTENDED", 2: "ORT_DISABLE_ALL"}


class SessionPool:
    """The sessions that CPU instances of one version share: at most one, made by the first that
    asks. ``Run`` of an ONNX Runtime session may be called by many threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: Any = None

    def get(self, make: Callable[[], Any]) -> Any:
        with self._lock:
            if self._session is None:
                self._session = make()
            return self._session

    def close(self) -> None:
        self._session = None


def open_session(onnxruntime: Any, model: Model, device: Device, options: Mapping[str, str]) -> Any:
    """A session that is ready to run on ``device``; raises `LoadError` naming the file at fault,
    or `ConfigError`. ``options`` are the backend's."""
    session_options = _session_options(onnxruntime, model, options)
    chosen = providers.choose(onnxruntime, model, device)
    if device.kind == "gpu" and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()  # finds the CUDA libraries that pip has installed
    session = _open(onnxruntime, model, session_options, chosen)
    active = session.get_providers()
    for name, _ in chosen:
        if name not in active:
            raise LoadError(f"model '{model.name}': {name} could not be started; active are {', '.join(active)}")
    return session


def open_unoptimized(onnxruntime: Any, model: Model, options: Mapping[str, str]) -> Any:
    """A session for looking at the graph only, opened as fast as the engine can.

    ``model.parameters`` is not read: nothing in it changes the graph.
    """
    session_options = onnxruntime.SessionOptions()
    session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session_options.intra_op_num_threads = 1
    session_options.log_severity_level = 3  # warnings come when the model is loaded in earnest
    if share_threads(onnxruntime, options):
        session_options.use_per_session_threads = False
    _register_libraries(session_options, model)
    return _open(onnxruntime, model, session_options, [(providers.CPU, {})])


def run_options(onnxruntime: Any, model: Model) -> Any:
    """What every ``Run`` of an instance is given. The engine's own error log is off, because the
    same text is in the answer."""
    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    if model.parameters.arena_shrinkage:
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", model.parameters.arena_shrinkage)
    return options


def default_intra_op_threads(config: ModelConfig, default_instances: int) -> int:
    """Threads within an operator when the config does not say: the cores divided among the CPU
    instances, so that a busy model keeps every core busy once, and not more."""
    cpu_kinds = (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_AUTO)
    instances = sum(
        group.count or default_instances
        for group in config.instance_group
        if group.kind in cpu_kinds and not group.passive
    )
    return max(1, available_cores() // max(1, instances or default_instances))


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
        options.intra_op_num_threads = parameters.intra_op_thread_count or default_intra_op_threads(model.config, 2)
        options.inter_op_num_threads = parameters.inter_op_thread_count
    for key, value in parameters.session.items():
        options.add_session_config_entry(key, value)
    _register_libraries(options, model)
    return options


def _register_libraries(options: Any, model: Model) -> None:
    """Load the config's libraries of custom operators, from the version's directory or the model's.

    An absolute path is refused by validation: a config may come over the network.
    """
    for library in model.config.model_operations.op_library_filename:
        path = model.resource(library if (model.path / library).exists() else f"../{library}")
        try:
            options.register_custom_ops_library(str(path))
        except Exception as error:  # pybind raises classes of its own
            raise LoadError(f"unable to load model '{model.name}': '{path}': {reword(error)}") from error


def _open(onnxruntime: Any, model: Model, options: Any, chosen: providers.Providers) -> Any:
    path = file_of(model.file("model.onnx"))
    references.check(path, len(path.relative_to(model.path.parent).parts) - 1)
    try:
        # The engine's own fallback would print to stdout and run elsewhere than asked.
        return onnxruntime.InferenceSession(str(path), options, chosen, enable_fallback=0)
    except Exception as error:  # pybind raises classes of its own
        reason = reword(error).replace(f"Load model from {path} failed:", "")
        raise LoadError(f"unable to load model '{model.name}': '{path}': {reason}") from error
