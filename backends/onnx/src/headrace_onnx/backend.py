"""The backend ``onnxruntime``: loads, completes and checks ONNX models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import AnyInstance, Backend, Code, Instance, LoadError, Model, Shared, names_all_tensors
from headrace_onnx.parameters import Parameters

if TYPE_CHECKING:
    from headrace_onnx.session import OpenedSession


class OnnxRuntime(Backend):
    """Serves ``<version>/model.onnx``, a file or a directory with external data."""

    name = "onnxruntime"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    hardware = "it has run on an NVIDIA H100 and an H200 (onnxruntime-gpu 1.31, CUDA 13.0)"
    instance_classes = (Instance,)
    engine_fields = ("model_operations", "optimization.execution_accelerators", "optimization.graph")
    default_cpu_instances = 2
    outputs_as_given = True  # the config was compared with the graph; a deviation at run time is the graph's own

    def complete_config(self, model: Model) -> None:
        """Complete the config from the graph; change nothing if the config names inputs and outputs."""
        from headrace_engines import complete_from_graph, default_max_batch_size
        from headrace_onnx.session import load_engine, open_unoptimized
        from headrace_onnx.session_graph import graph_of

        if names_all_tensors(model.config):
            return
        session = open_unoptimized(load_engine(), model, self.options)
        complete_from_graph(model.config, graph_of(session), default_max_batch_size(self.name, self.options))

    def share(self, model: Model) -> Shared[str, OpenedSession]:
        """Return the sessions by kind of device. ``Run`` of a session may be called by many threads at once."""
        return Shared()

    def load(self, model: Model) -> AnyInstance:
        from headrace_engines import check_against_graph, cuda_library
        from headrace_onnx import providers
        from headrace_onnx.device_binding import DeviceBinding
        from headrace_onnx.instance import DeviceInstance, OnnxInstance, OrtValueInstance, Plan
        from headrace_onnx.session import load_engine, open_session, run_options
        from headrace_onnx.session_graph import graph_of

        onnxruntime = load_engine()
        device = providers.device_of(onnxruntime, model)

        def make() -> OpenedSession:
            return open_session(onnxruntime, model, device, self.options)

        is_shared = device.kind == "cpu" and model.parameters.share_session_between_instances
        session, repeats = model.shared.get(device.kind, make) if is_shared else make()
        graph = graph_of(session)
        check_against_graph(model.config, graph)
        plan, options = Plan.of(model.config, graph, repeats), run_options(onnxruntime, model)
        if device.kind == "gpu" and not plan.string_inputs:
            binding = DeviceBinding(session, onnxruntime.OrtValue, cuda_library(), device.id)
            return DeviceInstance(session, plan, options, binding)
        if plan.has_bfloat16:
            if plan.string_inputs:
                raise LoadError(
                    f"unable to load model '{model.name}': input '{plan.string_inputs[0]}' is BYTES and another tensor "
                    "is BF16: ONNX Runtime's Python API cannot pass both",
                    Code.UNSUPPORTED,
                )
            return OrtValueInstance(session, plan, options, onnxruntime.OrtValue)
        instance = OnnxInstance(session, plan, options)
        instance.any_thread &= device.kind == "cpu"  # a wait for a GPU must not block the event loop
        return instance
