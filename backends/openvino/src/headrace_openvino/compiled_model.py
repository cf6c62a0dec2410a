"""OpenVINO itself, imported when the first model needs it, and its models: read, and compiled for a device."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from headrace import ConfigError, LoadError, Model, available_cores, one_line

log = logging.getLogger("headrace.openvino")


def load_engine() -> Any:
    """The module ``openvino``; raises `LoadError` saying how to install it."""
    try:
        import openvino
    except ImportError as error:
        raise LoadError(
            "backend 'openvino' needs the package openvino, which cannot be imported "
            f"({one_line(str(error))}); run: pip install openvino"
        ) from error
    return openvino


def reword(error: BaseException) -> str:
    """What an OpenVINO error says, without the lines about places in its own source."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(("Exception from ", "Check '"))]
    return one_line(" ".join(said) or type(error).__name__)


def open_core(openvino: Any) -> Any:
    core = openvino.Core()
    # A mapped file that somebody shortens while the model is served would end the process.
    core.set_property({"ENABLE_MMAP": False})
    return core


def read_model(core: Any, model: Model) -> Any:
    """The ``openvino.Model`` of the version's file; raises `LoadError` naming the file at fault."""
    path = model.file("model.xml")
    if path.suffix == ".xml":
        weights = path.with_suffix(".bin")
        if not weights.is_file():
            raise LoadError(f"unable to load model '{model.name}': no file '{weights}', the weights of '{path}'")
        files = [str(path), str(model.resource(str(weights.relative_to(model.path))))]
    else:
        _refuse_references(model, path)
        files = [str(path)]
    try:
        return core.read_model(*files)
    except Exception as error:  # pybind raises classes of its own
        told = "', '".join(files)
        raise LoadError(f"unable to load model '{model.name}': '{told}': {reword(error)}") from error


def compile_model(model: Model) -> Any:
    """A ``CompiledModel``; raises `LoadError`, or `ConfigError` for parameters that do not go together."""
    parameters = model.parameters
    core = open_core(load_engine())
    if parameters.cpu_extension_path:
        _add_extension(core, model)
    _require_devices(core, model)
    opened = read_model(core, model)
    if parameters.reshape_io_layers:
        _reshape(opened, model)
    try:
        return core.compile_model(opened, parameters.target_device, _properties(model))
    except Exception as error:  # pybind raises classes of its own
        raise LoadError(
            f"unable to load model '{model.name}' on device '{one_line(parameters.target_device)}': {reword(error)}"
        ) from error


def _require_devices(core: Any, model: Model) -> None:
    """Raise `LoadError` for a device that is not there, with those that are."""
    told = model.parameters.target_device
    group, colon, names = told.partition(":")
    available = core.available_devices
    for name in names.split(",") if colon else [group]:
        bare = name.lstrip("-").partition("(")[0]
        if not colon and bare in ("AUTO", "MULTI", "HETERO"):
            continue
        if bare not in available and bare not in {each.partition(".")[0] for each in available}:
            raise LoadError(
                f"unable to load model '{model.name}' on device '{one_line(told)}': there is no "
                f"'{one_line(bare)}' here, only {', '.join(available)}"
            )


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
        # Instances execute side by side in streams of the compiled model that they share, or else one after the other.
        groups = model.config.instance_group
        found["NUM_STREAMS"] = sum(group.count or 1 for group in groups if not group.passive) or 1
    threads = parameters.inference_num_threads
    if is_cpu and not threads:
        threads = available_cores()  # of all streams together
        log.info("model '%s' runs on %d threads", model.name, threads)
    if threads:
        found["INFERENCE_NUM_THREADS"] = threads
    if parameters.hint_bf16 or is_cpu:  # left alone, some CPUs compute an FP32 graph in BF16
        found["INFERENCE_PRECISION_HINT"] = "bf16" if parameters.hint_bf16 else "f32"
    return found


def _reshape(opened: Any, model: Model) -> None:
    """Give the inputs the dims of the config; the batch axis stays."""
    skipped = 1 if model.config.max_batch_size > 0 else 0
    dims = {io.name: [*(io.reshape.shape if io.HasField("reshape") else io.dims)] for io in model.config.input}
    shapes = {
        name: [*list(port.get_partial_shape())[:skipped], *dims[name]]
        for port in opened.inputs
        for name in port.get_names()
        if name in dims
    }
    try:
        opened.reshape(shapes)
    except Exception as error:  # pybind raises classes of its own
        raise LoadError(f"unable to load model '{model.name}': RESHAPE_IO_LAYERS: {reword(error)}") from error


def _add_extension(core: Any, model: Model) -> None:
    name = model.parameters.cpu_extension_path
    if model.is_sent:
        raise ConfigError(
            f"parameter 'CPU_EXTENSION_PATH' of model '{model.name}' came with a load request: it counts in the "
            "repository only"
        )
    path = model.resource(name if (model.path / name).exists() else f"../{name}")
    try:
        core.add_extension(str(path))
    except Exception as error:  # pybind raises classes of its own
        raise LoadError(f"unable to load model '{model.name}': '{path}': {reword(error)}") from error


def _refuse_references(model: Model, path: Path) -> None:
    """An ONNX file may name others, anywhere, by the key ``location``; OpenVINO would read them."""
    if path.suffix == ".onnx" and path.is_file() and b"location" in path.read_bytes():
        raise LoadError(
            f"unable to load model '{model.name}': '{path}' keeps weights in other files, which is not supported here: "
            "convert it with openvino.save_model, or serve it with the backend 'onnxruntime'"
        )
