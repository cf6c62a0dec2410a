"""The parameters of a model for the backend ``tensorrt``.

Source: docs/spec/behaviours.md section 10.5 for Triton's; the last two are ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace import ConfigError

_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")


@dataclass(frozen=True, slots=True)
class Parameters:
    #: When a context allocates its working memory: STATIC: at load, for any of the plan's profiles. ON_PROFILE_CHANGE:
    #: for its own profile.
    execution_context_allocation_strategy: str = "STATIC"
    #: Triton's way to spread one plan over several GPUs, which Headrace does not have: true is refused.
    enable_multi_device: bool = False
    multi_device_gpus: str = ""
    #: A file of NumPy arrays by name (``.npz``) in the version's directory: other weights for a refittable plan.
    refit_weights: str = ""
    #: The most bytes of weights on the GPU at once; the rest is copied there during the execution. -1 is all.
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
