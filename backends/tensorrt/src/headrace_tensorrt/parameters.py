"""The parameters of a model for the backend ``tensorrt``.

Source: docs/spec/behaviours.md section 10.5 for Triton's; the last two are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace import ConfigError

_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")


@dataclass(frozen=True, slots=True)
class Parameters:
    #: The working memory of a context. STATIC: for any of the plan's profiles. ON_PROFILE_CHANGE: for its own profile.
    execution_context_allocation_strategy: str = "STATIC"
    #: Triton's option for one plan on several GPUs. Headrace has no such feature, and refuses true.
    enable_multi_device: bool = False
    multi_device_gpus: str = ""
    #: A file of NumPy arrays by name (``.npz``) in the version's directory, with weights that replace a plan's.
    refit_weights: str = ""
    #: The most bytes of weights on the GPU at once. The rest is copied there during the execution. -1: no limit.
    weight_streaming_budget_bytes: int = -1

    def check(self, instance: str) -> None:
        """Raise `ConfigError` for an unsupported value; ``instance`` is the one being loaded."""
        strategy = self.execution_context_allocation_strategy
        if strategy not in _STRATEGIES:
            raise ConfigError(
                f"Invalid value for 'execution_context_allocation_strategy': '{strategy}' for model instance "
                f"'{instance}'. Supported values are 'STATIC' and 'ON_PROFILE_CHANGE'.",
                field="parameters['execution_context_allocation_strategy']",
            )
        if self.enable_multi_device:
            raise ConfigError(
                f"instance '{instance}': enable_multi_device asks for one plan on several GPUs, which this version "
                "does not have",
                field="parameters['enable_multi_device']",
            )
