"""The backend ``tensorflow``: loads, completes and checks SavedModels and frozen graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from headrace import (
    Backend,
    ConfigError,
    Device,
    Instance,
    LoadError,
    Model,
    ModelInstanceGroup,
    check_against_graph,
    complete_from_graph,
    default_max_batch_size,
    names_all_tensors,
    one_line,
)
from headrace_tf.instance import TensorFlowInstance
from headrace_tf.parameters import Parameters
from headrace_tf.saved_model import read_saved_model, require_shapes
from headrace_tf.session_pool import TensorFlowSessions, is_frozen, log, open_session
from headrace_tf.tensorflow_module import load_engine


class TensorFlow(Backend):
    """Serves ``<version>/model.savedmodel``, a directory, or ``<version>/model.graphdef``, a file."""

    name = "tensorflow"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    default_cpu_instances = 2
    rungs = (Instance,)
    unproven = "it has never run on a GPU"
    outputs_as_given = True  # the config has been held against the graph; what a graph does in spite of it is its own

    def complete_config(self, model: Model) -> None:
        """Everything that a signature knows; nothing for a frozen graph, or if the config names inputs and outputs."""
        if names_all_tensors(model.config) or is_frozen(model):
            return
        found = read_saved_model(load_engine(), model, model.file("model.savedmodel"))
        require_shapes(found.graph, model.name)
        complete_from_graph(model.config, found.graph, default_max_batch_size(self.name, self.options))

    def share(self, model: Model) -> TensorFlowSessions:
        return TensorFlowSessions()

    def load(self, model: Model) -> TensorFlowInstance:
        if libraries := model.config.model_operations.op_library_filename:
            raise ConfigError(
                f"model '{model.name}': op_library_filename '{one_line(libraries[0])}': libraries of custom operators "
                "are not loaded for TensorFlow models yet"
            )
        placed = replace(model, device=_device_of(load_engine(), model))
        pool = placed.shared
        opened = open_session(placed, self.options) if pool is None else pool.get(placed, self.options)
        try:
            check_against_graph(placed.config, opened.graph.graph)
            return TensorFlowInstance(placed, opened, pool)
        except BaseException:
            if pool is None:
                opened.session.close()
            else:
                pool.give_back(placed.device, opened)
            raise


def _device_of(tensorflow: Any, model: Model) -> Device:
    """Where the instance really runs: the CPU if no group asked for GPUs by name and TensorFlow sees none."""
    if model.device.kind != "gpu" or model.device.id < len(tensorflow.config.list_physical_devices("GPU")):
        return model.device
    if any(group.kind == ModelInstanceGroup.KIND_GPU for group in model.config.instance_group):
        raise LoadError(
            f"model '{model.name}' needs GPU {model.device.id}, which TensorFlow {tensorflow.__version__} does not "
            "see; run: pip install 'tensorflow[and-cuda]'"
        )
    log.warning("instance '%s' runs on the CPU: TensorFlow sees no GPU", model.instance_name)
    return Device("cpu")
