"""The ``parameters`` map of a Python model's config: its own, but for three keys.

Source: docs/spec/behaviours.md section 9.6. The model finds all of them in ``args["model_config"]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace import Code, ConfigError

#: The key that names the environment of a model.
ENVIRONMENT = "EXECUTION_ENV_PATH"


@dataclass(frozen=True, slots=True)
class Parameters:
    """What the backend reads; core reads ``isolation``."""

    #: A packed environment, its directory, or a file of requirements; empty for the server's own.
    execution_env_path: str = field(default="", metadata={"key": ENVIRONMENT})
    #: ``no`` would allow inputs on a GPU; inputs of Headrace are always in memory of the host.
    force_cpu_only_input_tensors: str = field(default="yes", metadata={"key": "FORCE_CPU_ONLY_INPUT_TENSORS"})
    #: Every other entry: the model's own.
    own: Mapping[str, str] = field(default_factory=dict, metadata={"prefix": ""})

    def __post_init__(self) -> None:
        if self.force_cpu_only_input_tensors not in ("yes", "no"):
            raise ConfigError(
                # With a quote at the end only, as Triton has it.
                f"Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: {self.force_cpu_only_input_tensors}'",
                Code.UNSUPPORTED,
                field="parameters['FORCE_CPU_ONLY_INPUT_TENSORS']",
            )
