"""The backend ``pytorch``: TorchScript files, and modules in a ``model.py``."""

from __future__ import annotations

from headrace import Backend, ConfigError, Instance, LoadError, Model, ModelConfig, Shared
from headrace_torch.eager import find_code, open_eager
from headrace_torch.instance import Forward, ForwardInstance
from headrace_torch.parameters import Parameters
from headrace_torch.script import open_script
from headrace_torch.torch_compile import CompiledInstance
from headrace_torch.torch_process import device_of, load_engine, set_jit, set_threads


class PyTorch(Backend):
    """Serves ``<version>/model.pt``, a TorchScript file; with ``runtime: "model.py"``, the module in that file."""

    name = "pytorch"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    rungs = (Instance,)
    has_runtimes = True
    unproven = "it has never run on a GPU"
    outputs_as_given = True  # as Triton: the file does not tell what it gives

    def complete_config(self, model: Model) -> None:
        """Nothing: neither a TorchScript file nor code tells data types and shapes.

        Raises `ConfigError` in Triton's words."""
        _require_tensors(model.config)

    def share(self, model: Model) -> Shared[str, Forward]:
        """Modules by device. ``forward`` of a TorchScript module may be called by many threads at once; whoever sets
        ENABLE_WEIGHT_SHARING for a module in a ``model.py`` says so of it."""
        return Shared()

    def unshare(self, shared: Shared[str, Forward]) -> None:
        for module in shared.made.values():
            module.close()
        shared.close()

    def load(self, model: Model) -> Instance:
        _require_tensors(model.config)
        if model.config.platform == "torch_aoti":
            raise LoadError(
                f"model '{model.name}': packages of AOTInductor (platform torch_aoti, model.pt2) are not served yet; "
                "save the model as TorchScript"
            )
        torch = load_engine()
        device = device_of(torch, model)
        set_threads(torch, model, self.default_cpu_instances)
        set_jit(torch, model)
        inputs, outputs = _names(model.config)
        code = find_code(model)

        def make() -> Forward:
            if code is None:
                return open_script(torch, model, device)
            return open_eager(torch, model, code, device, inputs)

        is_shared = model.parameters.enable_weight_sharing
        forward: Forward = model.shared.get(device, make) if is_shared else make()
        kind = CompiledInstance if forward.is_compiled else ForwardInstance
        stream = torch.cuda.Stream(device) if model.device.kind == "gpu" else None
        try:
            return kind(torch, forward, model, inputs, outputs, owns=not is_shared, stream=stream)
        except ConfigError:  # the names of its inputs and outputs
            if not is_shared:
                forward.close()
            raise


def _names(config: ModelConfig) -> tuple[list[str], list[str]]:
    """The tensors that a model is given and that it gives, in the config's order, those of sequences last."""
    batching = config.sequence_batching
    inputs = [io.name for io in config.input]
    inputs += [control.name for control in batching.control_input] + [state.input_name for state in batching.state]
    outputs = [io.name for io in config.output] + [state.output_name for state in batching.state]
    return inputs, list(dict.fromkeys(outputs))


def _require_tensors(config: ModelConfig) -> None:
    for field, given in (("input", config.input), ("output", config.output)):
        if not given:
            raise ConfigError(
                f"model configuration must contain at least one {field}, none were specified.", field=field
            )
