"""The identity backend: each output is the input at the same place in the config.

All data types, any shape. The parameters are those of Triton's sample backend (docs/spec/behaviours.md section 10.7).
They help to test batching and loading. Triton's also adds parameters to every response, which costs time. That is off
here: ``--backend-config=identity,triton-sample=true`` turns it on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from headrace.backends.base import Backend, Instance, Model, Tensors
from headrace.errors import ConfigError

#: The parameters in every response of Triton's sample backend.
SAMPLE_PARAMETERS: Mapping[str, str | int | bool | float] = {
    "param0": "an example string parameter",
    "param1": 42,
    "param2": False,
    "param3": 123.123,
}


@dataclass(frozen=True, slots=True)
class Parameters:
    execute_delay_ms: int = 0  #: added to every execution
    instance_wise_delay_multiplier: int = 0  #: instance n waits n times this, times the delay, too
    creation_delay_sec: int = 0  #: added to the load of every version


class Identity(Backend):
    name: ClassVar[str] = "identity"
    Parameters: ClassVar[type] = Parameters
    instance_classes = (Instance,)

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        setting = options.get("triton-sample", "false")
        if setting not in ("true", "false"):
            raise ConfigError(f"backend option triton-sample of 'identity' is '{setting}', expected true or false")
        self._is_sample = setting == "true"

    def share(self, model: Model) -> None:
        time.sleep(model.parameters.creation_delay_sec)

    def load(self, model: Model) -> Echo:
        sources = [io.name for io in model.config.input]
        targets = [io.name for io in model.config.output]
        if len(sources) != len(targets):
            raise ConfigError(f"identity model '{model.name}' has {len(sources)} inputs but {len(targets)} outputs")
        number = int(model.instance_name.rpartition("_")[2] or 0)
        parameters = model.parameters
        delay_ms = parameters.execute_delay_ms * max(1, number * parameters.instance_wise_delay_multiplier)
        repeated = dict(zip(targets, sources, strict=True))
        return Sample(repeated, delay_ms / 1000, model) if self._is_sample else Echo(repeated, delay_ms / 1000)


class Echo(Instance):
    """Returns its inputs. ``sources`` maps each output to its input. Sleeps ``delay_s`` per execution."""

    def __init__(self, sources: dict[str, str], delay_s: float) -> None:
        self._sources, self._delay_s = sources, delay_s
        self.any_thread = not delay_s

    def execute(self, inputs: Tensors) -> Tensors:
        if self._delay_s:
            time.sleep(self._delay_s)
        return {target: inputs[source] for target, source in self._sources.items() if source in inputs}


class Sample(Echo):
    """Triton's sample: also counts the bytes of its inputs, and adds parameters to every response."""

    response_parameters = SAMPLE_PARAMETERS

    def __init__(self, sources: dict[str, str], delay_s: float, model: Model) -> None:
        super().__init__(sources, delay_s)
        self.any_thread = False  # services must not be used on the event loop
        services = model.services
        if services is None:
            raise ConfigError(f"identity model '{model.name}': triton-sample needs a server, which keeps its metric")
        text = "Cumulative input byte size of all requests received by the model"
        family = services.metric_family("input_byte_size_counter", text, "counter")
        metric = services.metric(family, {"model": model.name, "version": str(model.version)}, None)
        self._count: Callable[[float], None] = partial(services.update_metric, metric, "increment")
        self._handles = (metric, family)
        self._release = services.release

    def execute(self, inputs: Tensors) -> Tensors:
        self._count(sum(tensor.nbytes for tensor in inputs.values()))
        return super().execute(inputs)

    def close(self) -> None:
        for handle in self._handles:
            self._release(handle)
