"""Compile a model for a device, by its parameters."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from headrace import ConfigError, LoadError, Model, ModelConfig, available_cores, one_line, read_isolation
from headrace_engines import Graph, threads_per_instance
from headrace_openvino.input_shapes import open_model
from headrace_openvino.openvino_api import open_core, reword
from headrace_openvino.ports import fixed_batch, graph_of, narrowed, port_names, with_resolved_dims

log = logging.getLogger("headrace.openvino")

#: The CPU's operators for a ``Loop`` or a ``TensorIterator``, and for an ``If``.
_REPEATING = ("TensorIterator", "If")


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """An ``openvino.CompiledModel``, with the names and dims of its file: compiling changes them.

    ``inputs`` and ``outputs`` are the names of its ports. ``rows`` is the number of rows that every batch must have; 0
    if any number is valid.
    """

    compiled: Any
    graph: Graph
    inputs: list[str]
    outputs: list[str]
    rows: int


def compile_model(model: Model) -> CompiledGraph:
    """Compile the file of a version.

    Raises `LoadError`, or `ConfigError` for parameters that contradict each other.
    """
    parameters = model.parameters
    core = open_core(model)
    _require_devices(core, model)
    opened = open_model(core, model)
    if parameters.target_device == "CPU" and (names := narrowed(opened, model.config)):
        log.warning(
            "model '%s': OpenVINO's CPU computes INT64 and UINT64 as INT32, from their lower 32 bits, and FP64 as "
            "FP32: %s",
            model.name,
            one_line(", ".join(names)),
            extra={"model": model.name},
        )
    graph, (inputs, outputs) = graph_of(opened, model.config), port_names(opened, model.config)
    rows = fixed_batch(opened, model.config)
    try:
        compiled = core.compile_model(opened, parameters.target_device, _properties(model))
    except Exception as error:  # pybind has its own exception classes
        raise LoadError(
            f"unable to load model '{model.name}' on device '{one_line(parameters.target_device)}': {reword(error)}"
        ) from error
    for kind, names, ports in (("inputs", inputs, compiled.inputs), ("outputs", outputs, compiled.outputs)):
        if len(names) != len(ports):
            raise LoadError(
                f"unable to load model '{model.name}': its file has {len(names)} {kind}, but OpenVINO compiled it to "
                f"{len(ports)}"
            )
    _warn_of_dropped_inputs(model, graph)
    return CompiledGraph(compiled, with_resolved_dims(graph, compiled, model.config), inputs, outputs, rows)


def without_dropped_inputs(config: ModelConfig, graph: Graph) -> ModelConfig:
    """Return the config without the inputs that OpenVINO has dropped from the graph because it does not use them.

    If the config lacks an input of the graph, a name is wrong, and the config is returned unchanged.
    """
    named = {io.name for io in config.input}
    configured = Graph.of_config(config).inputs
    if named <= graph.inputs.keys() or not graph.inputs.keys() <= configured.keys():
        return config
    reduced = ModelConfig()
    reduced.CopyFrom(config)
    del reduced.input[:]
    reduced.input.extend(io for io in config.input if io.name in graph.inputs)
    return reduced


def _warn_of_dropped_inputs(model: Model, graph: Graph) -> None:
    remaining = {io.name for io in without_dropped_inputs(model.config, graph).input}
    if dropped := [io.name for io in model.config.input if io.name not in remaining]:
        log.warning(
            "model '%s': OpenVINO has dropped inputs, which requests may have, but which have no effect: %s",
            model.name,
            one_line(", ".join(dropped)),
            extra={"model": model.name},
        )


def repeats(compiled: Any) -> bool:
    """True if the time of an execution on the CPU depends on the request: for loops, and for branches, which may have
    one."""
    operators = compiled.get_runtime_model().get_ops()
    return any(each.get_rt_info()["layerType"].value in _REPEATING for each in operators)


def instances_of(model: Model) -> int:
    """Return the number of instances that share a compiled model."""
    groups = model.config.instance_group
    return 1 if _is_apart(model) else sum(group.count or 1 for group in groups if not group.passive) or 1


def _is_apart(model: Model) -> bool:
    """True if each instance has its own process, and shares nothing."""
    return read_isolation(model.config.parameters) == "process"


def _require_devices(core: Any, model: Model) -> None:
    """Raise `LoadError` for a missing device, with the list of devices."""
    device = model.parameters.target_device
    lead = f"unable to load model '{model.name}' on device '{one_line(device)}'"
    group, colon, names = device.partition(":")
    available = core.available_devices
    if device == "AUTO":
        return
    if device in ("MULTI", "HETERO"):
        raise LoadError(f"{lead}: it is made of devices, which must be named: {device}:{','.join(available)}")
    for name in names.split(",") if colon else [group]:
        bare = name.partition("(")[0]  # followed by its number of requests, for MULTI
        is_there = bare in available or bare in {each.partition(".")[0] for each in available}
        if not is_there and not name.startswith("-"):  # AUTO:-GPU is valid without a GPU
            raise LoadError(f"{lead}: there is no '{one_line(bare)}' here, only {', '.join(available)}")


def _properties(model: Model) -> dict[str, Any]:
    parameters = model.parameters
    found: dict[str, Any] = {}
    is_cpu = parameters.target_device == "CPU"
    if parameters.compilation_num_threads:
        if is_cpu:
            raise ConfigError(
                "parameter 'COMPILATION_NUM_THREADS' is for other devices: OpenVINO's CPU has no such setting"
            )
        found["COMPILATION_NUM_THREADS"] = parameters.compilation_num_threads
    if parameters.performance_hint:
        found["PERFORMANCE_HINT"] = parameters.performance_hint
    if parameters.num_streams:
        found["NUM_STREAMS"] = parameters.num_streams
    elif is_cpu and not parameters.performance_hint:
        # Instances share a compiled model, and execute at the same time only if it has a stream for each.
        found["NUM_STREAMS"] = instances_of(model)
    threads = parameters.inference_num_threads
    if is_cpu and not threads:
        # The threads of all streams together.
        threads = threads_per_instance(model.config, 1) if _is_apart(model) else available_cores()
        log.info("model '%s' runs on %d threads", model.name, threads)
    if threads:
        found["INFERENCE_NUM_THREADS"] = threads
    # By default, OpenVINO computes an FP32 graph in BF16 on some CPUs.
    if parameters.hint_bf16 or is_cpu or parameters.target_device.startswith("BATCH:CPU"):
        found["INFERENCE_PRECISION_HINT"] = "bf16" if parameters.hint_bf16 else "f32"
    elif _may_choose_cpu(parameters.target_device):
        found["DEVICE_PROPERTIES"] = {"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}  # GPUs keep their own
    return found


def _may_choose_cpu(device: str) -> bool:
    """True if ``device`` may be the CPU and others: ``AUTO`` is, unless it names others or excludes the CPU."""
    group, _, listed = device.partition(":")
    names = [name.partition("(")[0] for name in listed.split(",") if name]
    if group == "AUTO" and all(name.startswith("-") for name in names):
        return "-CPU" not in names
    return "CPU" in names
