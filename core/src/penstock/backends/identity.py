"""The identity backend: each output is the input at the same place in the config.

All data types, any shape. Parameters ``execute_delay_ms`` and ``instance_wise_delay_multiplier``
are those of Triton's sample backend (behaviours.md section 10.7) and help to test batching.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from penstock.backends.base import Backend, Instance, Model, Tensors
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Parameters:
    execute_delay_ms: int = 0  #: added to every execution
    instance_wise_delay_multiplier: int = 0  #: instance n waits n times this, times the delay, too


class Identity(Backend):
    name: ClassVar[str] = "identity"
    Parameters: ClassVar[type] = Parameters

    def load(self, model: Model) -> Echo:
        sources = [io.name for io in model.config.input]
        targets = [io.name for io in model.config.output]
        if len(sources) != len(targets):
            raise ConfigError(f"identity model '{model.name}' has {len(sources)} inputs but {len(targets)} outputs")
        number = int(model.instance_name.rpartition("_")[2] or 0)
        parameters = model.parameters
        delay_ms = parameters.execute_delay_ms * max(1, number * parameters.instance_wise_delay_multiplier)
        return Echo(dict(zip(targets, sources, strict=True)), delay_ms / 1000)


class Echo(Instance):
    """``sources`` maps each output to the input it repeats; ``delay_s`` is slept per execution."""

    def __init__(self, sources: dict[str, str], delay_s: float) -> None:
        self._sources, self._delay_s = sources, delay_s

    def execute(self, inputs: Tensors) -> Tensors:
        if self._delay_s:
            time.sleep(self._delay_s)
        return {target: inputs[source] for target, source in self._sources.items() if source in inputs}
