"""The number of threads of an engine, so that the instances of a model share the cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace import available_cores

if TYPE_CHECKING:
    from headrace import ModelConfig


def threads_per_instance(config: ModelConfig, default_instances: int) -> int:
    """Return how many threads an operator may use: the cores divided among the CPU instances of ``config``.

    ``default_instances`` is the count of a CPU group that names none (``Backend.cpu_instances``).
    """
    from headrace import ModelInstanceGroup  # a process of a model may have no protobuf

    cpu_kinds = (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_AUTO)
    instances = sum(
        group.count or default_instances
        for group in config.instance_group
        if group.kind in cpu_kinds and not group.passive
    )
    return max(1, available_cores() // max(1, instances or default_instances))
