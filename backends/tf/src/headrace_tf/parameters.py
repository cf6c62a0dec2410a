"""The parameters of a model for TensorFlow, and the settings of ``--backend-config``.

Source: docs/spec/behaviours.md section 10.4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace import ConfigError, one_line

#: Instances of a CPU group whose config gives no count.
DEFAULT_CPU_INSTANCES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The parameters of one model for TensorFlow. For a thread count of 0, Headrace chooses."""

    #: Threads within one operator, of all models of the process together: the first model that loads decides.
    #: 0: the cores of this process, divided by the CPU instances of that model.
    intra_threads: int = field(default=0, metadata={"key": "TF_NUM_INTRA_THREADS"})
    #: Operators side by side, of all models of the process together. 0: none, the instance's thread runs them in turn.
    inter_threads: int = field(default=0, metadata={"key": "TF_NUM_INTER_THREADS"})
    #: True: each session has its own threads for operators side by side.
    per_session_threads: bool = field(default=False, metadata={"key": "TF_USE_PER_SESSION_THREADS"})
    #: The tag of the graph in a SavedModel; if empty, ``serve``.
    graph_tag: str = field(default="", metadata={"key": "TF_GRAPH_TAG"})
    #: The signature of a SavedModel; if empty, ``serving_default``.
    signature_def: str = field(default="", metadata={"key": "TF_SIGNATURE_DEF"})
    #: Instances of one device that share a session, and so one copy of the variables.
    max_session_share_count: int = field(default=1, metadata={"key": "MAX_SESSION_SHARE_COUNT"})
    #: A file ``{"init_ops": ["name", ...]}``, in the version or the model: operators that run once, at load.
    init_ops_file: str = field(default="", metadata={"key": "TF_INIT_OPS_FILE"})
    #: True: the graph may use operators that `headrace_tf.operator_rules` refuses. Counts in the repository only.
    trust: bool = False

    def __post_init__(self) -> None:
        for key, value in (("TF_NUM_INTRA_THREADS", self.intra_threads), ("TF_NUM_INTER_THREADS", self.inter_threads)):
            if value < 0:
                raise ConfigError(f"parameter '{key}' must be non-negative number for TensorFlow model")
        if self.max_session_share_count <= 0:
            raise ConfigError("parameter 'MAX_SESSION_SHARE_COUNT' must be positive number for TensorFlow model")


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """``--backend-config=tensorflow,...``, for all models."""

    #: The part of a GPU's memory that TensorFlow may take, 0 to 1; 0 is no bound.
    gpu_memory_fraction: float
    #: True: it allocates that memory as it needs it, not at once. Default: true if there is no bound.
    allow_growth: bool
    #: True: an operator may run on another device than its graph names.
    allow_soft_placement: bool

    @classmethod
    def read(cls, options: Mapping[str, str]) -> BackendOptions:
        """Raises `ConfigError` for a value that is none."""
        if (version := options.get("version", "2")) != "2":
            raise ConfigError(
                f"backend option version of 'tensorflow' must be 2, got '{one_line(version)}': graphs of TensorFlow 1 "
                "are run by TensorFlow 2 as well"
            )
        fraction = _fraction(options.get("gpu-memory-fraction", "0"))
        return cls(
            fraction,
            _is_on(options, "allow-growth", not fraction),
            _is_on(options, "allow-soft-placement", True),
        )


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(
            f"backend option gpu-memory-fraction of 'tensorflow' must be from 0 to 1, got '{one_line(text)}'"
        )
    return value


def _is_on(options: Mapping[str, str], key: str, default: bool) -> bool:
    text = options.get(key, str(default)).lower()
    if text not in ("true", "false", "1", "0"):
        raise ConfigError(f"backend option {key} of 'tensorflow' must be true or false, got '{one_line(text)}'")
    return text in ("true", "1")
