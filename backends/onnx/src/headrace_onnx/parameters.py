"""The parameters of a model for ONNX Runtime, and the options of accelerators.

Source: docs/spec/behaviours.md section 10.2. A config may come over the network, so everything unknown is refused. An
option must be known before it is passed on. One that names a file must stay in the model's directory. Unknown are
options with a memory address (``user_compute_stream``) and options that make the engine write a file elsewhere
(``session.optimized_model_filepath``).
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from headrace import ConfigError, Model, one_line, why_path_leaves

# fmt: off
#: Entries of ONNX Runtime's session options, without those that name a file or a folder.
SESSION = frozenset(
    f"session.{name}"
    for name in (
        "allow_released_opsets_only", "debug_layout_transformation", "disable_aot_function_inlining",
        "disable_cpu_ep_fallback", "disable_double_qdq_remover", "disable_prepacking",
        "disable_qdq_constant_folding", "disable_quant_qdq", "dynamic_block_base",
        "enable_dq_matmulnbits_fusion", "enable_gelu_approximation", "enable_quant_qdq",
        "enable_quant_qdq_cleanup", "force_spinning_stop", "graph_optimizations_loop_level",
        "inter_op.allow_spinning", "inter_op.spin_backoff_max", "inter_op.spin_duration_us",
        "intra_op.allow_spinning", "intra_op.spin_backoff_max", "intra_op.spin_duration_us",
        "intra_op_thread_affinities", "load_model_format", "prepack.enable_parallel",
        "qdq_matmulnbits_accuracy_level", "qdq_matmulnbits_block_size", "qdqisint8allowed",
        "set_denormal_as_zero", "strict_shape_type_inference", "use_deterministic_compute",
        "use_device_allocator_for_initializers", "use_env_allocators", "use_memory_mapped_ort_model",
        "use_ort_model_bytes_directly", "use_ort_model_bytes_for_initializers", "x64quantprecision",
    )
)

#: Options of the CUDA execution provider, without its addresses.
CUDA = frozenset(
    (
        "arena_extend_strategy", "cudnn_conv1d_pad_to_nc1d", "cudnn_conv_algo_search",
        "cudnn_conv_use_max_workspace", "device_id", "do_copy_in_default_stream", "enable_cuda_graph",
        "enable_skip_layer_norm_strict_mode", "fuse_conv_bias", "gpu_mem_limit", "prefer_nhwc", "sdpa_kernel",
        "tunable_op_enable", "tunable_op_max_tuning_duration_ms", "tunable_op_tuning_enable",
        "use_ep_level_unified_stream", "use_tf32",
    )
)

#: Options of the OpenVINO execution provider, without its addresses.
OPENVINO = frozenset(
    (
        "cache_dir", "device_id", "device_type", "disable_dynamic_shapes", "enable_causallm",
        "enable_dynamic_shapes", "enable_npu_fast_compile", "enable_opencl_throttling", "enable_qdq_optimizer",
        "enable_vpu_fast_compile", "layout", "load_config", "model_priority", "num_of_threads", "num_streams",
        "precision", "reshape_input",
    )
)

#: Options of the XNNPACK execution provider.
XNNPACK = frozenset(("intra_op_num_threads",))

#: Options of the CoreML execution provider.
COREML = frozenset(
    (
        "AllowLowPrecisionAccumulationOnGPU", "EnableOnSubgraphs", "MLComputeUnits", "ModelCacheDirectory",
        "ModelFormat", "ProfileComputePlan", "RequireStaticInputShapes", "SpecializationStrategy",
    )
)

#: Options of the DirectML execution provider.
DIRECTML = frozenset(
    (
        "device_filter", "device_id", "disable_metacommands", "enable_dynamic_graph_fusion", "enable_graph_capture",
        "performance_preference",
    )
)
# fmt: on

_CONV_SEARCH = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
_ARENA_GROWTH = ("kNextPowerOfTwo", "kSameAsRequested")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one model for ONNX Runtime. For a thread count of 0, Headrace chooses."""

    #: Threads within one operator. 0: the cores of this process divided among the CPU instances.
    intra_op_thread_count: int = 0
    #: Threads across operators; used by ``execution_mode`` 1 only. 0: ONNX Runtime's choice.
    inter_op_thread_count: int = 0
    #: 0 runs the operators one after the other, 1 runs branches of the graph side by side.
    execution_mode: int = 0
    enable_mem_arena: bool = True
    enable_mem_pattern: bool = True
    #: One session, so one copy of the weights, for all CPU instances of a version.
    share_session_between_instances: bool = True
    #: Arenas to shrink after every execution: ``cpu:0``, ``gpu:0``, ``cpu:0;gpu:0``.
    arena_shrinkage: str = field(default="", metadata={"key": "memory.enable_memory_arena_shrinkage"})
    #: Entries of ONNX Runtime's session options, those of `SESSION`.
    session: Mapping[str, str] = field(default_factory=dict, metadata={"prefix": "session."})
    #: Deprecated spellings of options of the ``cuda`` accelerator.
    cudnn_conv_algo_search: int | None = None
    gpu_mem_limit: int = 0
    arena_extend_strategy: int = 0
    do_copy_in_default_stream: bool = True
    #: True: ONNX Runtime writes the time of each operator into the directory of the backend option
    #: ``profiling-directory``.
    enable_profiling: bool = False

    def __post_init__(self) -> None:
        _check_session(self.session)
        if self.execution_mode not in (0, 1):
            raise ConfigError(
                "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got "
                f"{self.execution_mode} ."
            )
        for key, choices in (("cudnn_conv_algo_search", _CONV_SEARCH), ("arena_extend_strategy", _ARENA_GROWTH)):
            value = getattr(self, key)
            if value is not None and not 0 <= value < len(choices):
                raise ConfigError(f"unsupported {key} value '{value}' is requested")

    @property
    def cuda_options(self) -> dict[str, str]:
        """The deprecated CUDA parameters as options of the CUDA execution provider."""
        options = {
            "arena_extend_strategy": _ARENA_GROWTH[self.arena_extend_strategy],
            "do_copy_in_default_stream": str(int(self.do_copy_in_default_stream)),
        }
        if self.cudnn_conv_algo_search is not None:
            options["cudnn_conv_algo_search"] = _CONV_SEARCH[self.cudnn_conv_algo_search]
        if self.gpu_mem_limit:
            options["gpu_mem_limit"] = str(self.gpu_mem_limit)
        return options


def _check_session(entries: Mapping[str, str]) -> None:
    """Raise `ConfigError` for an entry that is not of `SESSION`."""
    for key in sorted(entries):
        if key not in SESSION:
            raise ConfigError(
                f"parameter '{one_line(key)}' is not passed on to ONNX Runtime{_hint(key, SESSION)}",
                field=f"parameters[{key!r}]",
            )


def check_options(accelerator: str, options: Mapping[str, str], known: frozenset[str]) -> None:
    """Raise `ConfigError` for an option of ``accelerator`` that is not ``known``."""
    for key in sorted(options):
        if key not in known:
            raise ConfigError(
                f"unknown parameter '{one_line(key)}' is provided for {accelerator} Execution Accelerator"
                f"{_hint(key, known)}"
            )


def place_files(model: Model, options: Mapping[str, str]) -> dict[str, str]:
    """Return ``options`` of a provider with absolute paths. Relative paths are below the version's directory.

    Raises `ConfigError` for a path outside of the model's directory. If the config came with a load request, it also
    refuses options that load code or name further files.
    """
    for key in options:
        if key in _REPOSITORY_ONLY:
            model.refuse_if_sent(f"'{key}'")
    return {key: _PLACED[key](model, key, value) if key in _PLACED else value for key, value in options.items()}


def _path(model: Model, key: str, value: str) -> str:
    inside = _below(model.path.parent, value) if value.startswith("/") else value
    if reason := why_path_leaves(inside, levels=0 if value.startswith("/") else 1):
        raise ConfigError(
            f"parameter '{key}' of model '{model.name}' is '{one_line(value)}', which must stay in the model directory"
            f": {reason}"
        )
    start = model.path.parent if value.startswith("/") else model.path
    return posixpath.normpath(start.absolute() / inside)  # not through a link and up again


def _below(folder: Path, path: str) -> str:
    """Return ``path`` relative to ``folder``, before or after following links; ``path`` itself if it is outside."""
    for top in (folder.absolute(), folder.resolve()):
        if Path(path).is_relative_to(top):
            return str(Path(path).relative_to(top))
    return path


def _paths(model: Model, key: str, value: str) -> str:
    """Return paths of libraries, separated by semicolons."""
    return ";".join(_path(model, key, one) for one in value.split(";") if one)


def _name(model: Model, key: str, value: str) -> str:
    """Return the part of a file's name, unchanged."""
    _path(model, key, f"x/{value}")
    return value


def _json(model: Model, key: str, value: str) -> str:
    """Return settings as JSON, or the path of their file."""
    return value if value.lstrip().startswith("{") else _path(model, key, value)


#: The options that name files, and the function for each.
_PLACED: Mapping[str, Callable[[Model, str, str], str]] = {
    "trt_engine_cache_path": _path,
    "trt_timing_cache_path": _path,
    "trt_ep_context_file_path": _path,
    "trt_extra_plugin_lib_paths": _paths,
    "trt_engine_cache_prefix": _name,
    "trt_int8_calibration_table_name": _name,
    "cache_dir": _path,
    "load_config": _json,
    "ModelCacheDirectory": _path,
}
#: Native code, and settings that may name any file.
_REPOSITORY_ONLY = ("trt_extra_plugin_lib_paths", "load_config")


def _hint(key: str, known: frozenset[str]) -> str:
    nearest = get_close_matches(key, sorted(known), 1)
    return f"; did you mean '{nearest[0]}'?" if nearest else ""
