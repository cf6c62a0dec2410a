"""The backend ``tensorflow``: completes configs, and loads SavedModels and frozen graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from headrace import Backend, Instance, Model, ModelConfig, names_all_tensors, parse_parameters
from headrace_tf.parameters import DEFAULT_CPU_INSTANCES, BackendOptions, Parameters

if TYPE_CHECKING:
    from headrace_tf.instance import TensorFlowInstance
    from headrace_tf.tensorflow_session import SessionPool


class TensorFlow(Backend):
    """Serves ``<version>/model.savedmodel``, a directory, or ``<version>/model.graphdef``, a file."""

    name = "tensorflow"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    default_cpu_instances = DEFAULT_CPU_INSTANCES
    instance_classes = (Instance,)
    engine_fields = ("model_operations", "optimization.execution_accelerators", "optimization.graph")
    hardware = "it has never run on a GPU"
    outputs_as_given = True  # the config was compared with the graph; a deviation at run time is the graph's own

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._read_options = BackendOptions.read(options)

    def complete_config(self, model: Model) -> None:
        """Complete the config from a signature; change nothing for a frozen graph, or if the config names inputs and
        outputs.
        """
        from headrace_engines import complete_from_graph, default_max_batch_size
        from headrace_tf.model_graph import require_ranks
        from headrace_tf.saved_model import read_saved_model
        from headrace_tf.tensorflow_process import load_engine
        from headrace_tf.tensorflow_session import is_frozen

        if names_all_tensors(model.config) or is_frozen(model):
            return
        found = read_saved_model(load_engine(), model, model.file("model.savedmodel"))
        require_ranks(model.config, found)
        complete_from_graph(model.config, found.graph, default_max_batch_size(self.name, self.options))

    def repository_code(self, config: ModelConfig) -> str:
        """Return the graph's file if the model has the parameter ``trust``, else nothing. Raises `ConfigError` for a
        wrong parameter.
        """
        is_code = parse_parameters(Parameters, config.parameters).trust
        return f"{config.default_model_filename or 'its graph'} (parameter 'trust')" if is_code else ""

    def share(self, model: Model) -> SessionPool:
        from headrace_tf.tensorflow_session import SessionPool

        return SessionPool()

    def load(self, model: Model) -> TensorFlowInstance:
        from headrace_tf.instance import TensorFlowInstance
        from headrace_tf.tensorflow_process import device_of, load_engine

        placed = replace(model, device=device_of(load_engine(), model))
        pool: SessionPool = placed.shared
        opened = pool.get(placed, self._read_options)
        try:
            return TensorFlowInstance(placed, opened, pool)
        except BaseException:
            pool.release(placed.device, opened)
            raise
