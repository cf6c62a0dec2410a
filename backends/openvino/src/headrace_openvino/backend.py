"""The backend ``openvino``: loads, completes and checks models of OpenVINO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace import Backend, Instance, Model, Shared, dtypes, names_all_tensors
from headrace_openvino.parameters import Parameters

if TYPE_CHECKING:
    from headrace_openvino.instance import OpenVinoInstance


class OpenVino(Backend):
    """Serves ``<version>/model.xml`` with ``model.bin``, or what ``default_model_filename`` names."""

    name = "openvino"
    Parameters = Parameters
    devices = ("cpu",)  # TARGET_DEVICE selects OpenVINO's device
    dtypes = tuple(dtype for dtype in dtypes.ALL if dtype is not dtypes.BYTES)
    instance_classes = (Instance,)
    engine_fields = ()
    hardware = "it has run on CPUs only, whatever TARGET_DEVICE may name"
    outputs_as_given = True  # the config was compared with the graph; a deviation at run time is the graph's own

    def complete_config(self, model: Model) -> None:
        """Complete the config from the graph; change nothing if the config names inputs and outputs."""
        from headrace_engines import complete_from_graph, default_max_batch_size
        from headrace_openvino.input_shapes import open_model
        from headrace_openvino.openvino_api import open_core
        from headrace_openvino.ports import graph_of

        if names_all_tensors(model.config):
            return
        opened = open_model(open_core(model), model)
        graph = graph_of(opened, model.config)
        complete_from_graph(model.config, graph, default_max_batch_size(self.name, self.options))

    def share(self, model: Model) -> Shared[str, Any]:
        """Return the compiled model, by its target device: instances are streams of it."""
        return Shared()

    def load(self, model: Model) -> OpenVinoInstance:
        from headrace_engines import check_against_graph
        from headrace_openvino.compiled_model import compile_model, without_dropped_inputs
        from headrace_openvino.instance import OpenVinoInstance
        from headrace_openvino.openvino_api import load_engine

        openvino = load_engine()
        compiled = model.shared.get(model.parameters.target_device, lambda: compile_model(model))
        check_against_graph(without_dropped_inputs(model.config, compiled.graph), compiled.graph)
        return OpenVinoInstance(openvino, model, compiled)
