"""The backend ``pytorch``: chooses the file of a version, and the module that opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace import Backend, ConfigError, HeadraceError, Instance, Model, ModelConfig, Shared, names_all_tensors
from headrace_torch.parameters import Parameters, trusted_file
from headrace_torch.weight_sharing import SHARING_INSTANCES, default_instances, instances_of, is_pt2, shares_weights

if TYPE_CHECKING:
    from headrace_torch.exported_program import Program
    from headrace_torch.instance import Forward


class PyTorch(Backend):
    """Serves ``<version>/model.pt``, a TorchScript file; ``<version>/model.pt2``, a program of torch.export or a
    package of AOTInductor; with ``runtime: "model.py"``, the module in that file."""

    name = "pytorch"
    Parameters = Parameters
    devices = ("gpu", "cpu")
    instance_classes = (Instance,)
    engine_fields = ("optimization.cuda",)
    has_runtimes = True
    hardware = "it has run on an NVIDIA H200 and an H100 (PyTorch 2.11, CUDA 13.0)"
    default_cpu_instances = SHARING_INSTANCES
    outputs_as_given = True  # as Triton: the file does not declare its outputs

    def cpu_instances(self, config: ModelConfig) -> int:
        """Return 2, which share their weights, if sharing is safe; else 1."""
        return default_instances(config)

    def complete_config(self, model: Model) -> None:
        """Complete the config from a program; TorchScript files and code have no data types and shapes.

        Raises `ConfigError` in Triton's words if nothing has them.
        """
        from headrace_engines import default_max_batch_size

        if not is_pt2(model.config):
            _require_tensors(model.config)
        elif not names_all_tensors(model.config):
            _complete_from_program(model, default_max_batch_size(self.name, self.options))

    def repository_code(self, config: ModelConfig) -> str:
        """Return the model's code: a ``model.py``, or a file with the parameter ``trust``. Raises `ConfigError` for a
        wrong parameter.
        """
        return config.runtime or trusted_file(config)

    def share(self, model: Model) -> Shared[str, Forward | Program]:
        """Return the modules, shared by device.

        Many threads may call ``forward`` of a TorchScript module or a program at once, if it changes no state. For a
        module in a ``model.py``, ENABLE_WEIGHT_SHARING declares this.
        """
        return Shared()

    def unshare(self, shared: Shared[str, Forward | Program]) -> None:
        from headrace_torch.torch_process import release_gpu_memory

        while shared.made:
            shared.made.popitem()[1].close()
        release_gpu_memory()

    def load(self, model: Model) -> Instance:
        from headrace_engines import Graph
        from headrace_torch.eager import find_code, open_eager
        from headrace_torch.instance import ForwardInstance
        from headrace_torch.script import open_script
        from headrace_torch.torch_compile import CompiledInstance
        from headrace_torch.torch_process import device_of, load_engine, set_jit, set_threads

        if is_pt2(model.config):
            return self._load_program(model)
        _require_tensors(model.config)
        torch = load_engine()
        device = device_of(torch, model)
        set_threads(torch, model, self.cpu_instances(model.config))
        set_jit(torch, model)
        configured = Graph.of_config(model.config)
        inputs, outputs = list(configured.inputs), list(configured.outputs)
        code = find_code(model)

        def make() -> Forward:
            if code is None:
                return open_script(torch, model, device)
            return open_eager(torch, model, code, device, inputs)

        is_shared = shares_weights(model)
        forward: Forward = model.shared.get(device, make) if is_shared else make()
        kind = CompiledInstance if forward.is_compiled else ForwardInstance
        try:
            return kind(
                torch, forward, model, inputs, outputs, owns=not is_shared, **self._copying(torch, model, device)
            )
        except HeadraceError:  # the names of its inputs and outputs, or no CUDA graphs
            if not is_shared:
                forward.close()
            raise

    def _load_program(self, model: Model) -> Instance:
        from headrace_torch.aoti import open_package
        from headrace_torch.exported_program import open_program
        from headrace_torch.program_instance import ProgramInstance
        from headrace_torch.pt2_archive import Pt2Archive
        from headrace_torch.torch_process import device_of, load_engine, set_threads

        torch = load_engine()
        device = device_of(torch, model)
        set_threads(torch, model, self.cpu_instances(model.config))

        def make() -> Program:
            with Pt2Archive(model.name, model.file("model.pt2")) as archive:
                if archive.packages:
                    return open_package(torch, model, archive, device, count)
                return open_program(torch, model, archive, device)

        is_shared = shares_weights(model)
        count = instances_of(model.config) if is_shared else 1
        program: Program = model.shared.get(device, make) if is_shared else make()
        return ProgramInstance(torch, program, model, owns=not is_shared, **self._copying(torch, model, device))

    def _copying(self, torch: Any, model: Model, device: str) -> dict[str, Any]:
        """Return the CUDA stream of an instance, and the memory for its copies; nothing on other devices."""
        if model.device.kind != "gpu":
            return {}
        from headrace_torch.torch_process import not_capturing, pinned_pool

        pinned = pinned_pool(torch, self.options)
        with not_capturing():
            torch.cuda.synchronize(device)  # work done while a model is opened is not on the stream
        return {"stream": torch.cuda.Stream(device), "pinned": pinned}


def _complete_from_program(model: Model, default_rows: int) -> None:
    """Complete the config from the program. Raises `LoadError`.

    Raises `ConfigError` for a package without a program, which lacks data types and shapes of its outputs.
    """
    from headrace_engines import complete_from_graph
    from headrace_torch.exported_program import describe_program
    from headrace_torch.pt2_archive import Pt2Archive
    from headrace_torch.tensor_names import LeafNames

    with Pt2Archive(model.name, model.file("model.pt2")) as archive:
        if not archive.programs:
            _require_tensors(model.config)
        signature = describe_program(archive)
    most = signature.most_rows
    rows = default_rows if most is None else min(default_rows, most)
    complete_from_graph(model.config, LeafNames(model.config, signature).graph(), rows)


def _require_tensors(config: ModelConfig) -> None:
    for field, tensors in (("input", config.input), ("output", config.output)):
        if not tensors:
            raise ConfigError(
                f"model configuration must contain at least one {field}, none were specified.", field=field
            )
