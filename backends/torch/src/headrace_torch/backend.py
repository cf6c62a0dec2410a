"""The backend ``pytorch``: loads TorchScript models."""

from __future__ import annotations

from headrace import Backend, ConfigError, Instance, LoadError, Model, ModelConfig, Shared
from headrace_torch.instance import ScriptInstance
from headrace_torch.parameters import Parameters
from headrace_torch.script import Script, open_script
from headrace_torch.torch_process import device_of, load_engine, set_threads


class PyTorch(Backend):
    """Serves ``<version>/model.pt``, a TorchScript file."""

    name = "pytorch"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    rungs = (Instance,)
    unproven = "it has never run on a GPU"
    outputs_as_given = True  # as Triton: the file does not tell what it gives

    def complete_config(self, model: Model) -> None:
        """Nothing: a TorchScript file tells neither data types nor shapes. Raises `ConfigError` in Triton's words."""
        _require_tensors(model.config)

    def share(self, model: Model) -> Shared[str, Script]:
        """Modules by device. ``forward`` of a TorchScript module may be called by many threads at once."""
        return Shared()

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

        def make() -> Script:
            return open_script(torch, model, device)

        script = model.shared.get(device, make) if model.parameters.enable_weight_sharing else make()
        batching = model.config.sequence_batching
        inputs = [io.name for io in model.config.input]
        inputs += [control.name for control in batching.control_input] + [state.input_name for state in batching.state]
        outputs = [io.name for io in model.config.output] + [state.output_name for state in batching.state]
        return ScriptInstance(torch, script, model.name, inputs, list(dict.fromkeys(outputs)), model.parameters, device)


def _require_tensors(config: ModelConfig) -> None:
    for field, given in (("input", config.input), ("output", config.output)):
        if not given:
            raise ConfigError(
                f"model configuration must contain at least one {field}, none were specified.", field=field
            )
