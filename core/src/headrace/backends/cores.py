"""How many threads an engine may start, so that the instances of a model do not crowd each other out."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.config.model_config_pb2 import ModelConfig


def available_cores() -> int:
    """Cores that this process may use: its CPU affinity, and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def threads_per_instance(config: ModelConfig, default_instances: int) -> int:
    """Threads within an operator when the config does not say: the cores divided among the CPU
    instances, so that a busy model keeps every core busy once, and not more.

    ``default_instances`` is how many a CPU group without a count has (``Backend.cpu_instances``).
    """
    from headrace.config.model_config_pb2 import ModelInstanceGroup  # a process host has no protobuf to import

    cpu_kinds = (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_AUTO)
    instances = sum(
        group.count or default_instances
        for group in config.instance_group
        if group.kind in cpu_kinds and not group.passive
    )
    return max(1, available_cores() // max(1, instances or default_instances))
