"""What a config may tell TensorFlow: the ``parameters`` of a model.

Source: docs/spec/behaviours.md section 10.4.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What one model tells TensorFlow. A thread count of 0 lets Headrace choose."""

    #: Threads within one operator, of all models of the process together: the first model that loads decides.
    #: 0: the cores of this process.
    intra_threads: int = field(default=0, metadata={"key": "TF_NUM_INTRA_THREADS"})
    #: Operators side by side, of all models of the process together. 0: none, the instance's thread runs them in turn.
    inter_threads: int = field(default=0, metadata={"key": "TF_NUM_INTER_THREADS"})
    #: Whether each session has threads of its own for operators side by side.
    per_session_threads: bool = field(default=False, metadata={"key": "TF_USE_PER_SESSION_THREADS"})
    #: The tag of the graph in a SavedModel; ``serve`` unless said.
    graph_tag: str = field(default="", metadata={"key": "TF_GRAPH_TAG"})
    #: The signature of a SavedModel; ``serving_default`` unless said.
    signature_def: str = field(default="", metadata={"key": "TF_SIGNATURE_DEF"})
    #: Instances of one device that share a session, and so one copy of the variables.
    max_session_share_count: int = field(default=1, metadata={"key": "MAX_SESSION_SHARE_COUNT"})
    #: A file ``{"init_ops": ["name", ...]}``, in the version or the model: operators that run once, at load.
    init_ops_file: str = field(default="", metadata={"key": "TF_INIT_OPS_FILE"})
    #: Whether the graph may do what `headrace_tf.operators` refuses.
    trust: bool = False

    def __post_init__(self) -> None:
        for key, value in (("TF_NUM_INTRA_THREADS", self.intra_threads), ("TF_NUM_INTER_THREADS", self.inter_threads)):
            if value < 0:
                raise ConfigError(f"parameter '{key}' must be non-negative number for TensorFlow model")
        if self.max_session_share_count <= 0:
            raise ConfigError("parameter 'MAX_SESSION_SHARE_COUNT' must be positive number for TensorFlow model")
