"""The backend ``tensorrt``: finds the plan for a GPU, completes and checks the config, and makes instances."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from headrace import (
    AnyInstance,
    Backend,
    ConfigError,
    Instance,
    LoadError,
    Model,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    Shared,
    Spec,
    names_all_tensors,
    one_line,
    open_regular,
)
from headrace_tensorrt.element_types import ELEMENT_TYPES
from headrace_tensorrt.parameters import Parameters

if TYPE_CHECKING:
    from headrace_tensorrt.cuda import CudaDevice
    from headrace_tensorrt.plan_engine import PlanEngine
    from headrace_tensorrt.plan_executions import ExecutionSettings
    from headrace_tensorrt.plan_shapes import PlanTensor, Profile

log = logging.getLogger("headrace.tensorrt")

_FLAGS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
_PRIORITIES = {"PRIORITY_DEFAULT": 0, "PRIORITY_MAX": -1, "PRIORITY_MIN": 1}


class TensorRT(Backend):
    """Serves ``<version>/model.plan``, or the file in ``cc_model_filenames`` for the GPU's compute capability."""

    name = "tensorrt"
    Parameters = Parameters
    devices = ("gpu",)
    dtypes = tuple(ELEMENT_TYPES.values())
    outputs_as_given = True  # the config was compared with the plan
    instance_classes = (Instance,)
    engine_fields = ("cc_model_filenames", "optimization.cuda")
    hardware = "its calls to TensorRT and CUDA have never run on a GPU, only beside a recorded fake"

    def complete_config(self, model: Model) -> None:
        """Complete the config from the plan; change nothing if the config names inputs and outputs."""
        from headrace_engines import complete_from_graph
        from headrace_tensorrt.cuda_driver import cuda_driver
        from headrace_tensorrt.plan_engine import load_engine
        from headrace_tensorrt.plan_shapes import graph_of

        config = model.config
        if names_all_tensors(config):
            return
        group = config.instance_group[0] if config.instance_group else ModelInstanceGroup()
        load_engine()
        known = [gpu for gpu in group.gpus if gpu < cuda_driver().count_gpus()]
        device = self._device(known[0] if known else 0)  # core reports a missing GPU
        path = _plan_file(model, device)
        engine = self._open(path, dla_core=-1)
        profiles = _profiles_of(group, engine, config.name)
        most = max(profile.max_rows for profile in profiles)
        if config.max_batch_size > most:
            raise ConfigError(
                f"autofill failed for model '{config.name}': configuration specified max-batch {config.max_batch_size} "
                f"but TensorRT engine only supports max-batch {most}",
                field="max_batch_size",
            )
        complete_from_graph(config, graph_of(engine.tensors), most)
        formats = {tensor.name for tensor in engine.tensors if tensor.format}
        for io in _tensors(config):
            io.is_non_linear_format_io = io.is_non_linear_format_io or io.name in formats

    def share(self, model: Model) -> Shared[tuple[int, int], PlanEngine]:
        """Return the engines by GPU and accelerator core. Contexts of one engine can execute at the same time."""
        return Shared()

    def unshare(self, shared: Shared[tuple[int, int], PlanEngine]) -> None:
        """Release the engines, each on its GPU."""
        from headrace_tensorrt.cuda import cuda_device

        while shared.made:
            (gpu, _), engine = shared.made.popitem()
            cuda_device(gpu).enter()
            del engine

    def load(self, model: Model) -> AnyInstance:
        from headrace_engines import check_against_graph
        from headrace_tensorrt.instance import PlanInstance
        from headrace_tensorrt.plan_shapes import graph_of

        config, group = model.config, _group_of(model)
        if model.device.kind != "gpu":
            raise ConfigError(f"unable to load model '{model.name}', TensorRT backend supports only GPU device")
        model.parameters.check(model.instance_name)
        device = self._device(model.device.id)
        path, dla_core = _plan_file(model, device), _dla_core(group)

        def make() -> PlanEngine:
            engine = self._open(path, dla_core)
            _set_weights(model, engine)
            return engine

        engine = model.shared.get((device.ordinal, dla_core), make)
        check_against_graph(config, graph_of(engine.tensors))
        _check_formats(config, engine.tensors)
        profiles = _profiles_of(group, engine, config.name)
        _log_settings_without_effect(config)
        settings = _settings(model, engine, profiles)
        instance = PlanInstance(engine, device, settings)
        log.info(
            "Created instance %s on GPU %d with stream priority %d and optimization profile %s",
            model.instance_name, device.ordinal, instance.stream_priority, ", ".join(map(str, settings.profiles)),
        )  # fmt: skip
        return instance

    def _device(self, ordinal: int) -> CudaDevice:
        """Return the GPU, entered by this thread. The error names the first missing part: TensorRT, driver, GPU."""
        from headrace_tensorrt.cuda import cuda_device
        from headrace_tensorrt.cuda_driver import cuda_driver
        from headrace_tensorrt.plan_engine import load_engine

        load_engine()
        cuda_driver()
        device = cuda_device(ordinal)
        device.enter()
        return device

    def _open(self, path: Path, dla_core: int) -> PlanEngine:
        from headrace_tensorrt.plan_engine import PlanEngine, load_plugins

        load_plugins(self.options.get("plugins", ""))
        return PlanEngine(path, allows_host_code=_flag(self.options, "version-compatible"), dla_core=dla_core)


# ---------------------------------------------------------------------------
# Reading a config
# ---------------------------------------------------------------------------


def _plan_file(model: Model, device: CudaDevice) -> Path:
    """Return the plan for ``device``; raises `LoadError` naming the file that is missing."""
    chosen = model.config.cc_model_filenames.get(device.compute_capability)
    return model.resource(chosen) if chosen else model.file("model.plan")


def _group_of(model: Model) -> ModelInstanceGroup:
    """Return the group of the instance being loaded. The group's name is a prefix of the instance's."""
    name = model.instance_name.rpartition("_")[0]
    return next((group for group in model.config.instance_group if group.name == name), ModelInstanceGroup())


def _dla_core(group: ModelInstanceGroup) -> int:
    return int(group.secondary_devices[0].device_id) if group.secondary_devices else -1


def _profiles_of(group: ModelInstanceGroup, engine: PlanEngine, model: str) -> list[Profile]:
    """Return the profiles in the config, each once; by default, the plan's first profile."""
    chosen: dict[int, Profile] = {}
    for text in group.profile or ["0"]:
        index = int(text)  # core has validated the number
        if index >= len(engine.profiles):
            raise ConfigError(
                f"unable to load model '{model}': Can not set the specified optimization profile {index}. Expected "
                f"optimization profile index range 0-{len(engine.profiles) - 1}",
                field="instance_group",
            )
        chosen[index] = engine.profiles[index]
    return list(chosen.values())


def _settings(model: Model, engine: PlanEngine, profiles: list[Profile]) -> ExecutionSettings:
    from headrace_engines import Graph
    from headrace_tensorrt.graph_specs import graph_specs
    from headrace_tensorrt.plan_executions import ExecutionSettings

    config, optimization = model.config, model.config.optimization
    made = {name for batch in config.batch_input for name in batch.target_name}
    ragged = frozenset({io.name for io in config.input if io.allow_ragged_batch} | made)
    has_graphs = optimization.cuda.graphs and not ragged
    most = max(profile.max_rows for profile in profiles)
    if config.max_batch_size > most:
        raise ConfigError(
            f"unexpected configuration maximum batch size {config.max_batch_size} for '{model.instance_name}', model "
            f"maximum is {most}",
            field="max_batch_size",
        )
    return ExecutionSettings(
        name=model.instance_name,
        max_rows=config.max_batch_size,
        profiles=[profile.index for profile in profiles],
        outputs=frozenset(Graph.of_config(config).outputs),
        strategy=model.parameters.execution_context_allocation_strategy,
        graphs={profile.index: graph_specs(config, profile) for profile in profiles} if has_graphs else {},
        dims={io.name: Spec.from_config(io).backend_dims for io in config.input},
        ragged=ragged,
        priority=_PRIORITIES.get(optimization.ModelPriority.Name(optimization.priority), 0),
        spins=optimization.cuda.busy_wait_events,
        pins_inputs=optimization.input_pinned_memory.enable,
        pins_outputs=optimization.output_pinned_memory.enable,
    )


def _tensors(config: ModelConfig) -> list[ModelInput | ModelOutput]:
    return [*config.input, *config.output]


def _check_formats(config: ModelConfig, tensors: tuple[PlanTensor, ...]) -> None:
    """Raise `ConfigError` unless the config declares non-linear formats, and `LoadError` for a padded format."""
    marked = {io.name: io.is_non_linear_format_io for io in _tensors(config)}
    for tensor in tensors:
        what = f"model '{config.name}': tensor '{tensor.name}'"
        if tensor.name not in marked:
            continue
        if marked[tensor.name] and not tensor.format:
            raise ConfigError(
                f"{what} is incorrectly marked as a non-linear format IO in the model configuration: its format is "
                "linear"
            )
        if tensor.format and not marked[tensor.name]:
            raise ConfigError(
                f"{what} has a non-linear IO format ({tensor.format}) but the model configuration doesn't mark it: set "
                "is_non_linear_format_io"
            )
        if tensor.is_padded:
            raise LoadError(
                f"{what} has the format {tensor.format}, which fills its axis {tensor.vector_axis} up: such tensors "
                "cannot be sent. Build the plan with a linear format, or with a multiple of "
                f"{tensor.vector_length} there"
            )


def _set_weights(model: Model, engine: PlanEngine) -> None:
    name, budget = model.parameters.refit_weights, model.parameters.weight_streaming_budget_bytes
    if name:
        path = model.resource(name)
        try:
            with open_regular(path) as file, np.load(file, allow_pickle=False) as archive:
                weights = {key: archive[key] for key in archive.files}
        except (OSError, ValueError, BadZipFile, AttributeError) as error:
            raise LoadError(f"'{path}' is no file of arrays by name (.npz): {one_line(str(error))}") from error
        engine.refit(weights, str(path))
    if budget >= 0:
        engine.stream_weights(budget)


def _log_settings_without_effect(config: ModelConfig) -> None:
    optimization = config.optimization
    settings: Mapping[str, Any] = {
        "cuda.output_copy_stream": optimization.cuda.output_copy_stream,
        "eager_batching": optimization.eager_batching,
        "gather_kernel_buffer_threshold": optimization.gather_kernel_buffer_threshold,
    }
    for field in (name for name, value in settings.items() if value):
        log.info(
            "model '%s': optimization.%s has no effect: give its group a count of 2, so that one instance copies while "
            "the other computes",
            config.name, field,
        )  # fmt: skip


def _flag(options: Mapping[str, str], key: str) -> bool:
    text = options.get(key, "false")
    if text.lower() not in _FLAGS:
        raise ConfigError(f"backend option {key} of 'tensorrt' must be true or false, got '{one_line(text)}'")
    return _FLAGS[text.lower()]
