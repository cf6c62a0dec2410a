"""Choose the execution providers of a model by the config's accelerators (docs/spec/behaviours.md section 10.2)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from headrace import ConfigError, Device, LoadError, Model, ModelConfig, ModelInstanceGroup, one_line
from headrace_onnx import parameters
from headrace_onnx.parameters import check_options, place_files

log = logging.getLogger("headrace.onnxruntime")

#: Name and options, in order of preference, as ``InferenceSession`` takes them.
Providers: TypeAlias = "list[tuple[str, dict[str, str]]]"

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
TENSORRT, OPENVINO = "TensorrtExecutionProvider", "OpenVINOExecutionProvider"
XNNPACK, COREML, DIRECTML = "XnnpackExecutionProvider", "CoreMLExecutionProvider", "DmlExecutionProvider"

#: For each provider, the build of the engine that has it.
_BUILDS = {
    CUDA: "run: pip install onnxruntime-gpu",
    TENSORRT: "run: pip install onnxruntime-gpu and TensorRT",
    OPENVINO: "run: pip install onnxruntime-openvino",
    XNNPACK: "no wheel of PyPI has it: build onnxruntime with --use_xnnpack",
    COREML: "the wheels of onnxruntime for macOS have it",
    DIRECTML: "the wheel onnxruntime-directml, for Windows, has it",
}


@dataclass(frozen=True, slots=True)
class Accelerator:
    """An accelerator without CUDA. ``title`` is its name in errors; ``known`` are its options, ``preset``
    their values unless the config sets them.
    """

    provider: str
    title: str
    known: frozenset[str]
    preset: Mapping[str, str] = field(default_factory=dict)


#: The accelerators of Triton and of other builds of the engine, by their names in ``cpu_execution_accelerator``.
_CPU_ACCELERATORS = {
    "openvino": Accelerator(OPENVINO, "OpenVINO", parameters.OPENVINO, {"device_type": "CPU"}),
    "xnnpack": Accelerator(XNNPACK, "XNNPACK", parameters.XNNPACK),
    "coreml": Accelerator(COREML, "CoreML", parameters.COREML),
    "directml": Accelerator(DIRECTML, "DirectML", parameters.DIRECTML),
}

#: Keys of the ``tensorrt`` accelerator that ONNX Runtime spells differently.
_TENSORRT_RENAMED = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}
_TENSORRT_PRECISIONS = {"FP32": None, "FP16": "trt_fp16_enable", "BF16": "trt_bf16_enable", "INT8": "trt_int8_enable"}
_TENSORRT_PASSED = frozenset(
    (
        "trt_max_partition_iterations",
        "trt_min_subgraph_size",
        "trt_dla_enable",
        "trt_dla_core",
        "trt_engine_cache_enable",
        "trt_engine_cache_path",
        "trt_engine_cache_prefix",
        "trt_dump_subgraphs",
        "trt_force_sequential_engine_build",
        "trt_context_memory_sharing_enable",
        "trt_layer_norm_fp32_fallback",
        "trt_timing_cache_enable",
        "trt_timing_cache_path",
        "trt_force_timing_cache",
        "trt_detailed_build_log",
        "trt_build_heuristics_enable",
        "trt_sparsity_enable",
        "trt_builder_optimization_level",
        "trt_auxiliary_streams",
        "trt_tactic_sources",
        "trt_extra_plugin_lib_paths",
        "trt_profile_min_shapes",
        "trt_profile_max_shapes",
        "trt_profile_opt_shapes",
        "trt_cuda_graph_enable",
        "trt_dump_ep_context_model",
        "trt_ep_context_file_path",
        "trt_ep_context_embed_mode",
    )
)


def device_of(onnxruntime: Any, model: Model) -> Device:
    """Return the device on which the instance runs.

    If the engine has no CUDA, a group of KIND_AUTO runs on the CPU. Raises `LoadError` for a group of KIND_GPU.
    """
    if model.device.kind != "gpu":
        return Device("cpu")
    if CUDA in onnxruntime.get_available_providers():
        return model.device
    if any(group.kind == ModelInstanceGroup.KIND_GPU for group in model.config.instance_group):
        require(onnxruntime, CUDA, model.name)
    log.warning("instance '%s' runs on the CPU: this onnxruntime has no CUDA", model.instance_name)
    return Device("cpu")


def choose(onnxruntime: Any, model: Model, device: Device) -> Providers:
    """Return the providers of a session on ``device``. Raises `ConfigError` for an unknown accelerator
    or key, `LoadError` for one that this installation does not have."""
    chosen: Providers = []
    accelerators = model.config.optimization.execution_accelerators
    if device.kind == "gpu":
        chosen += _gpu(accelerators.gpu_execution_accelerator, model, device)
    elif accelerators.gpu_execution_accelerator:
        log.warning("model '%s': GPU Execution Accelerator will be ignored for model instance on CPU", model.name)
    chosen += _cpu(accelerators.cpu_execution_accelerator, model)
    for name, _ in chosen:
        require(onnxruntime, name, model.name)
    return [*chosen, (CPU, {})]


def require(onnxruntime: Any, provider: str, model: str) -> None:
    """Raise `LoadError` unless this installation of the engine has ``provider``."""
    available = onnxruntime.get_available_providers()
    if provider not in available:
        raise LoadError(
            f"model '{model}' needs {provider}, but onnxruntime {onnxruntime.__version__} offers only "
            f"{', '.join(available)}; {_BUILDS[provider]}"
        )


def tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a ``tensorrt`` accelerator as ONNX Runtime spells them."""
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _TENSORRT_PRECISIONS:
                raise ConfigError(f"unsupported precision mode '{one_line(value)}' is requested")
            if (flag := _TENSORRT_PRECISIONS[value]) is not None:
                options[flag] = "1"
        elif key in _TENSORRT_RENAMED or key in _TENSORRT_PASSED:
            options[_TENSORRT_RENAMED.get(key, key)] = value
        else:
            raise ConfigError(f"unknown parameter '{one_line(key)}' is provided for TensorRT Execution Accelerator")
    return options


def _gpu(accelerators: Iterable[Any], model: Model, device: Device) -> Providers:
    cuda = dict(model.parameters.cuda_options)
    chosen: Providers = []
    for accelerator in accelerators:
        if accelerator.name == "tensorrt":
            options = place_files(model, tensorrt_options(accelerator.parameters))
            chosen.append((TENSORRT, options | {"device_id": str(device.id)}))
        elif accelerator.name == "cuda":
            check_options("CUDA", accelerator.parameters, parameters.CUDA)
            cuda |= accelerator.parameters
        else:
            raise _unknown(accelerator.name)
    if cuda.get("enable_cuda_graph", "0").lower() not in ("0", "false"):
        raise ConfigError(
            f"parameter 'enable_cuda_graph' of model '{model.name}' is not supported: a graph reads the memory of the "
            "request that it was captured with, and each request has memory of its own"
        )
    if "cudnn_conv_algo_search" not in cuda and _varies_in_shape(model.config):
        # The default, EXHAUSTIVE, tries all algorithms for each new shape, while requests wait.
        cuda["cudnn_conv_algo_search"] = "HEURISTIC"
        log.info(
            "model '%s': its shapes vary, so cudnn_conv_algo_search is HEURISTIC; ONNX Runtime's default is EXHAUSTIVE",
            model.name,
        )
    return [*chosen, (CUDA, cuda | {"device_id": str(device.id)})]


def _varies_in_shape(config: ModelConfig) -> bool:
    return config.max_batch_size > 1 or any(-1 in each.dims for each in config.input)


def _cpu(accelerators: Iterable[Any], model: Model) -> Providers:
    chosen: Providers = []
    for accelerator in accelerators:
        if (found := _CPU_ACCELERATORS.get(accelerator.name)) is None:
            raise _unknown(accelerator.name)
        check_options(found.title, accelerator.parameters, found.known)
        chosen.append((found.provider, {**found.preset, **place_files(model, accelerator.parameters)}))
    return chosen


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"unknown Execution Accelerator '{one_line(name)}' is requested")
