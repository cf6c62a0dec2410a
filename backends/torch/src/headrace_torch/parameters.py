"""What a config may tell PyTorch. Source: docs/spec/behaviours.md section 10.3."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace import ConfigError, one_line

#: What ``AUTOCAST`` may be; empty computes in the model's own types.
AUTOCAST = ("", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What one model tells PyTorch. A thread count of 0 lets Headrace choose."""

    #: Nothing is recorded for gradients. ``false`` leaves that on, for models that take gradients themselves.
    inference_mode: bool = field(default=True, metadata={"key": "INFERENCE_MODE"})
    #: Run TorchScript without its optimiser: the first requests are faster, the others may be slower.
    disable_optimized_execution: bool = field(default=False, metadata={"key": "DISABLE_OPTIMIZED_EXECUTION"})
    disable_cudnn: bool = field(default=False, metadata={"key": "DISABLE_CUDNN"})
    #: Instances of a version on the same device run one module, whose weights are then in memory once.
    enable_weight_sharing: bool = field(default=False, metadata={"key": "ENABLE_WEIGHT_SHARING"})
    #: Give unused memory of a GPU back after every execution.
    enable_cache_cleaning: bool = field(default=False, metadata={"key": "ENABLE_CACHE_CLEANING"})
    #: Threads within an operator. 0: the cores of this process divided among the CPU instances.
    intra_op_thread_count: int = field(default=0, metadata={"key": "INTRA_OP_THREAD_COUNT"})
    #: Threads across operators, for the whole process; the first model that says it wins.
    inter_op_thread_count: int = field(default=0, metadata={"key": "INTER_OP_THREAD_COUNT"})
    #: Mixed precision: ``bfloat16`` or ``float16`` where PyTorch holds that to be safe.
    autocast: str = field(default="", metadata={"key": "AUTOCAST"})
    #: Load a file whose code could write files or reach other libraries. Only for files from people you trust.
    trust: bool = False

    def __post_init__(self) -> None:
        if self.autocast not in AUTOCAST:
            raise ConfigError(
                f"parameter 'AUTOCAST' is '{one_line(self.autocast)}', expected bfloat16 or float16",
                field="parameters['AUTOCAST']",
            )
        for key, value in (
            ("INTRA_OP_THREAD_COUNT", self.intra_op_thread_count),
            ("INTER_OP_THREAD_COUNT", self.inter_op_thread_count),
        ):
            if value < 0:
                raise ConfigError(
                    f"parameter '{key}' is {value}, but a number of threads is 0 or more", field=f"parameters[{key!r}]"
                )
