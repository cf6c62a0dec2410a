"""The `InstanceInfo` of an instance for schedulers, made from its placement."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.config.model_config_pb2 import ModelConfig
from headrace.executors.devices import Placement, ResourceDemand
from headrace.schedulers.base import InstanceInfo


@dataclass(frozen=True, slots=True, eq=False)
class LimitedInstance(InstanceInfo):
    """An instance that needs resources while it executes. A scheduler sees an `InstanceInfo`."""

    demand: ResourceDemand = field(default_factory=ResourceDemand)


def instance_info(placement: Placement, config: ModelConfig) -> InstanceInfo:
    """Return what the scheduler of the model with ``config`` gets about the instance at ``placement``."""
    slots = max(1, config.max_batch_size)
    if placement.demand.units:
        return LimitedInstance(placement.name, placement.device, slots, placement.demand)
    return InstanceInfo(placement.name, placement.device, slots)
