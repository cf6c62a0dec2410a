"""The sessions of one version: opened on a device, filled with variables, and shared by as many instances as may."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace import ConfigError, Device, LoadError, Model, available_cores
from headrace_tf import operator_scan
from headrace_tf.frozen_graph import import_graph, read_frozen_graph
from headrace_tf.model_graph import ModelGraph
from headrace_tf.saved_model import read_saved_model
from headrace_tf.tensorflow_module import load_engine, reword

log = logging.getLogger("headrace.tensorflow")
_threads_lock = threading.Lock()
_threads_of_process: int | None = None


@dataclass(slots=True)
class OpenSession:
    """A session that is ready to run, and how many instances use it."""

    session: Any
    graph: ModelGraph
    users: int = 1


class TensorFlowSessions:
    """Sessions by device. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[Device, list[OpenSession]] = {}

    def get(self, model: Model, options: Mapping[str, str]) -> OpenSession:
        """One for ``model.device`` that has room, opened if there is none. Raises `LoadError` or `ConfigError`."""
        with self._lock:
            there = self._sessions.setdefault(model.device, [])
            for opened in there:
                if opened.users < model.parameters.max_session_share_count:
                    opened.users += 1
                    return opened
            opened = open_session(model, options)
            there.append(opened)
            return opened

    def give_back(self, device: Device, opened: OpenSession) -> None:
        with self._lock:
            opened.users -= 1
            if not opened.users:
                self._sessions[device].remove(opened)
                opened.session.close()


def is_frozen(model: Model) -> bool:
    """Whether the model is a frozen graph, by its platform, else by what lies there."""
    platform = model.config.platform
    if platform not in ("", "tensorflow_savedmodel", "tensorflow_graphdef"):
        raise ConfigError(f"platform {platform} not supported for TensorFlow model '{model.name}'")
    if platform:
        return platform == "tensorflow_graphdef"
    named = model.config.default_model_filename
    return (model.path / named).is_file() if named else (model.path / "model.graphdef").is_file()


def read_graph(tensorflow: Any, model: Model) -> ModelGraph:
    if is_frozen(model):
        return read_frozen_graph(tensorflow, model, model.file("model.graphdef"))
    return read_saved_model(tensorflow, model, model.file("model.savedmodel"))


def open_session(model: Model, options: Mapping[str, str]) -> OpenSession:
    tensorflow = load_engine()
    if model.parameters.trust and model.is_sent:
        raise ConfigError(
            f"parameter 'trust' of model '{model.name}' came with a load request: it counts in the repository only"
        )
    graph = read_graph(tensorflow, model)
    file_names = () if model.parameters.trust else operator_scan.check(tensorflow, model.name, graph)
    config = _session_config(tensorflow, model, options)
    with tensorflow.Graph().as_default() as imported:
        with tensorflow.device(f"/device:GPU:{model.device.id}" if model.device.kind == "gpu" else None):
            import_graph(tensorflow, model, graph.path, graph.graph_def)
        session = tensorflow.compat.v1.Session(graph=imported, config=config)
    try:
        _fill(model, session, graph, file_names)
    except BaseException:
        session.close()
        raise
    return OpenSession(session, graph)


def _fill(model: Model, session: Any, graph: ModelGraph, file_names: tuple[str, ...]) -> None:
    """Restore the variables and run what initialises the rest. The names of files are the model's own: each that
    ``file_names`` gives is looked at, and then given to the operators as it was seen."""
    assets = {tensor: str(path) for tensor, path in graph.assets.items()}
    try:
        if (checkpoint := graph.checkpoint) is not None:
            session.run(checkpoint.restore_op, {checkpoint.filename_tensor: str(checkpoint.prefix), **assets})
        names = dict(assets)
        for tensor in file_names:
            tensor = tensor if ":" in tensor else f"{tensor}:0"
            value = assets[tensor] if tensor in assets else session.run(tensor, assets)
            text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
            if text not in assets.values():
                raise LoadError(
                    f"unable to load model '{model.name}': '{graph.path}' reads the file {text!r}, which is none of "
                    "its assets"
                )
            names[tensor] = text
        for name in (*graph.init_ops, *_init_ops(model)):
            session.run(name.partition(":")[0], names)
    except LoadError:
        raise
    except Exception as error:  # TensorFlow's own, and what it says of names that are not there
        raise LoadError(f"unable to load model '{model.name}': '{graph.path}': {reword(error)}") from error


def _init_ops(model: Model) -> list[str]:
    """What ``TF_INIT_OPS_FILE`` names, from the version's directory or the model's."""
    name = model.parameters.init_ops_file
    if not name:
        return []
    path = model.resource(name if (model.path / name).exists() else f"../{name}")
    try:
        found = json.loads(path.read_bytes())["init_ops"]
    except (ValueError, TypeError, KeyError) as error:
        raise LoadError(f"'{path}' must be JSON with a list 'init_ops' of the names of operators: {error}") from error
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise LoadError(f"'{path}': 'init_ops' must be a list of the names of operators")
    return found


def _session_config(tensorflow: Any, model: Model, options: Mapping[str, str]) -> Any:
    parameters = model.parameters
    config = tensorflow.compat.v1.ConfigProto()
    config.intra_op_parallelism_threads = _threads(parameters.intra_threads or available_cores())
    config.use_per_session_threads = parameters.per_session_threads
    # Below 0 the instance's own thread runs all operators: no hop, and as many busy threads as instances.
    config.inter_op_parallelism_threads = parameters.inter_threads or (0 if parameters.per_session_threads else -1)
    fraction = _fraction(options)
    config.gpu_options.per_process_gpu_memory_fraction = fraction
    config.gpu_options.allow_growth = _is_on(options, "allow-growth", not fraction)
    config.allow_soft_placement = _is_on(options, "allow-soft-placement", True)
    if model.device.kind == "cpu":
        config.device_count["GPU"] = 0
    graph = model.config.optimization.graph
    levels = tensorflow.compat.v1.OptimizerOptions
    if graph.level:
        level = levels.OFF if graph.level < 0 else levels.ON_1 if graph.level == 1 else levels.ON_2
        config.graph_options.optimizer_options.global_jit_level = level
    _accelerate(model, config)
    return config


def _accelerate(model: Model, config: Any) -> None:
    accelerators = model.config.optimization.execution_accelerators
    if accelerators.cpu_execution_accelerator:
        raise ConfigError("CPU Execution Accelerator is not supported in TensorFlow backend")
    names = [each.name for each in accelerators.gpu_execution_accelerator]
    for name in names:
        if name not in ("tensorrt", "gpu_io", "auto_mixed_precision"):
            raise ConfigError(f"unknown Execution Accelerator '{name}' is requested")
    if {"tensorrt", "auto_mixed_precision"} <= {*names}:
        raise ConfigError("Auto mixed precision can not be set with TFTRT optimization")
    if names and model.device.kind == "cpu":
        log.warning("GPU Execution Accelerator will be ignored for model instance on CPU", extra={"model": model.name})
    elif "tensorrt" in names:
        raise LoadError(
            f"model '{model.name}' asks for the accelerator 'tensorrt', which TensorFlow's packages no longer have "
            "(since 2.18): leave it out, or export the model for the backend 'tensorrt'"
        )
    elif "auto_mixed_precision" in names:
        config.graph_options.rewrite_options.auto_mixed_precision = 1  # RewriterConfig.ON


def _threads(asked: int) -> int:
    """``asked`` for the first model of the process; TensorFlow has these threads once."""
    global _threads_of_process
    with _threads_lock:
        if _threads_of_process is None:
            _threads_of_process = asked
            log.info("TensorFlow runs the operators of all its models on %d threads", asked)
        elif _threads_of_process != asked:
            log.warning("TensorFlow's operators stay at %d threads, not %d", _threads_of_process, asked)
        return _threads_of_process


def _fraction(options: Mapping[str, str]) -> float:
    text = options.get("gpu-memory-fraction", "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"backend option gpu-memory-fraction of 'tensorflow' must be from 0 to 1, got '{text}'")
    return value


def _is_on(options: Mapping[str, str], key: str, default: bool) -> bool:
    text = options.get(key, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise ConfigError(f"backend option {key} of 'tensorflow' must be true or false, got '{text}'")
    return text in ("true", "1")
