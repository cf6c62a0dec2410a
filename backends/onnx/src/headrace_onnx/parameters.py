"""The ``parameters`` that a config may give an ONNX model (docs/spec/behaviours.md section 10.2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace import ConfigError
from headrace_onnx.allowed import check_session

_CONV_SEARCH = ("EXHAUSTIVE", "HEURISTIC", "DEFAULT")
_ARENA_GROWTH = ("kNextPowerOfTwo", "kSameAsRequested")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What one model tells ONNX Runtime. A thread count of 0 lets Headrace choose."""

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
    #: Entries of ONNX Runtime's session options, those of `headrace_onnx.allowed.SESSION`.
    session: Mapping[str, str] = field(default_factory=dict, metadata={"prefix": "session."})
    #: Deprecated spellings of options of the ``cuda`` accelerator.
    cudnn_conv_algo_search: int = 0
    gpu_mem_limit: int = 0
    arena_extend_strategy: int = 0
    do_copy_in_default_stream: bool = True

    def __post_init__(self) -> None:
        check_session(self.session)
        if self.execution_mode not in (0, 1):
            raise ConfigError(
                "Invalid configuration value provided. Expected values for  execution_mode are 0 or 1 but got "
                f"{self.execution_mode} ."
            )
        for key, choices in (("cudnn_conv_algo_search", _CONV_SEARCH), ("arena_extend_strategy", _ARENA_GROWTH)):
            value = getattr(self, key)
            if not 0 <= value < len(choices):
                raise ConfigError(f"unsupported {key} value '{value}' is requested")

    @property
    def cuda_options(self) -> dict[str, str]:
        """The deprecated CUDA parameters as options of the CUDA execution provider."""
        options = {
            "cudnn_conv_algo_search": _CONV_SEARCH[self.cudnn_conv_algo_search],
            "arena_extend_strategy": _ARENA_GROWTH[self.arena_extend_strategy],
            "do_copy_in_default_stream": str(int(self.do_copy_in_default_stream)),
        }
        if self.gpu_mem_limit:
            options["gpu_mem_limit"] = str(self.gpu_mem_limit)
        return options
