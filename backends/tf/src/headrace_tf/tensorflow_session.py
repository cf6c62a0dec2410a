"""Opens the sessions of one version on a device, restores their variables, and shares them among instances."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace import ConfigError, Device, LoadError, Model, one_line, read_regular
from headrace_engines import Graph, check_against_graph
from headrace_tf.frozen_graph import read_frozen_graph, with_outputs
from headrace_tf.model_graph import ModelGraph, require_fed
from headrace_tf.operator_check import check_operators
from headrace_tf.operator_libraries import load_libraries
from headrace_tf.parameters import BackendOptions
from headrace_tf.saved_model import read_saved_model
from headrace_tf.session_config import session_config
from headrace_tf.tensorflow_process import load_engine, own_operators, reword


@dataclass(slots=True)
class OpenSession:
    """A session that is ready to run, and the number of its instances. ``repeats``: the time of an execution depends on
    the values of a request, and may be unlimited."""

    session: Any
    graph: ModelGraph
    repeats: bool
    users: int = 1


class SessionPool:
    """The sessions of one version, by device. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sessions: dict[Device, list[OpenSession]] = {}

    def get(self, model: Model, options: BackendOptions) -> OpenSession:
        """Return a session for ``model.device`` below the maximum of instances; open one if there is none.

        Raises `LoadError` or `ConfigError`.
        """
        with self._lock:
            there = self._sessions.setdefault(model.device, [])
            for opened in there:
                if opened.users < model.parameters.max_session_share_count:
                    opened.users += 1
                    return opened
            opened = open_session(model, options)
            there.append(opened)
            return opened

    def release(self, device: Device, opened: OpenSession) -> None:
        """Release ``opened`` for one instance; close it after the last one."""
        with self._lock:
            opened.users -= 1
            if not opened.users:
                self._sessions[device].remove(opened)
                opened.session.close()


def is_frozen(model: Model) -> bool:
    """True if the model is a frozen graph, by its platform, else by its files."""
    platform = model.config.platform
    if platform not in ("", "tensorflow_savedmodel", "tensorflow_graphdef"):
        raise ConfigError(f"platform {platform} not supported for TensorFlow model '{model.name}'")
    if platform:
        return platform == "tensorflow_graphdef"
    return (model.path / (model.config.default_model_filename or "model.graphdef")).is_file()


def open_session(model: Model, options: BackendOptions) -> OpenSession:
    """Return a session on ``model.device`` whose graph agrees with the config, is allowed to run, and has its
    variables.

    Raises `LoadError` naming the file at fault, or `ConfigError`.
    """
    if model.parameters.trust:
        model.refuse_if_sent("parameter 'trust'")
    tensorflow = load_engine()
    libraries = load_libraries(tensorflow, model)
    frozen = is_frozen(model)
    read, file = (read_frozen_graph, "model.graphdef") if frozen else (read_saved_model, "model.savedmodel")
    graph = read(tensorflow, model, model.file(file))
    graph = replace(graph, init_ops=(*graph.init_ops, *_init_ops(model)))
    # Before the graph is imported: to infer shapes, TensorFlow runs parts of it.
    trusted = model.parameters.trust
    file_names = () if trusted else check_operators(model.name, graph, own_operators(), libraries)
    with tensorflow.Graph().as_default() as imported:
        _import(tensorflow, model, graph)
    if frozen:
        graph = with_outputs(tensorflow, model.config, graph, imported)
    check_against_graph(model.config, graph.graph)
    require_fed(model.name, graph, Graph.of_config(model.config).outputs)
    session = tensorflow.compat.v1.Session(graph=imported, config=session_config(tensorflow, model, options))
    try:
        _fill(model, session, graph, file_names)
    except BaseException:
        session.close()
        raise
    # The session has the graph: the parsed file, all constants included, need not stay in memory as well.
    return OpenSession(session, replace(graph, graph_def=None), graph.repeats)


def _import(tensorflow: Any, model: Model, graph: ModelGraph) -> None:
    """Add ``graph`` to the graph of this thread, placed on the model's device. Raises `LoadError` naming the file."""
    device = f"/device:GPU:{model.device.id}" if model.device.kind == "gpu" else None
    with tensorflow.device(device):
        try:
            tensorflow.import_graph_def(graph.graph_def, name="")
        except Exception as error:  # ValueError, TypeError, KeyError and TensorFlow's own
            raise LoadError(f"unable to load model '{model.name}': '{graph.path}': {reword(error)}") from error


def _fill(model: Model, session: Any, graph: ModelGraph, file_names: Sequence[str]) -> None:
    """Restore the variables and run what initialises the rest. The names of files are the model's own: each name from
    ``file_names`` is checked, and the checked value is given to the operators.
    """
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
        for name in graph.init_ops:
            session.run(name.partition(":")[0], names)
    except LoadError:
        raise
    except Exception as error:  # TensorFlow's own, and its error for missing names
        raise LoadError(f"unable to load model '{model.name}': '{graph.path}': {reword(error)}") from error


def _init_ops(model: Model) -> list[str]:
    """Return the operators in ``TF_INIT_OPS_FILE``, from the version's directory or the model's."""
    name = model.parameters.init_ops_file
    if not name:
        return []
    path: Path = model.resource_or_above(name)
    try:
        found = json.loads(read_regular(path))["init_ops"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise LoadError(
            f"unable to load model '{model.name}': '{path}' must be JSON with a list 'init_ops' of the names of "
            f"operators: {one_line(str(error))}"
        ) from error
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise LoadError(
            f"unable to load model '{model.name}': '{path}': 'init_ops' must be a list of the names of operators"
        )
    return found
