"""The units of each resource of the rate limiter: the limit of the operator, or the largest demand of an instance.

Source: docs/spec/behaviours.md section 6.7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from headrace.config.option_parts import RateLimitResource
from headrace.errors import Code, ConfigError
from headrace.executors.devices import Resource, ResourceDemand


def limits_for(demands: Iterable[ResourceDemand], operator_limits: Sequence[RateLimitResource]) -> dict[Resource, int]:
    """Return the units of each resource in ``demands``. Raises `ConfigError`, in Triton's words."""
    limits: dict[Resource, int] = {}
    for demand in demands:
        for resource, units in demand.units.items():
            limits[resource] = max(units, limits.get(resource, 0))
    for resource, needed in sorted(limits.items(), key=lambda item: item[0].order):
        if not operator_limits:
            break
        limits[resource] = available = _operator_units(resource, operator_limits)
        if available < needed:
            raise ConfigError(
                f'Resource count for "{resource.name}" is limited to {available} which will prevent scheduling of one '
                f"or more model instances, the minimum required count is {needed}",
                Code.INVALID_ARGUMENT,
                field="instance_group",
            )
    everywhere = {resource.name for resource in limits if resource.device is None}
    for resource in limits:
        if resource.device is not None and resource.name in everywhere:
            raise ConfigError(
                f'Resource "{resource.name}" is present as both global and device-specific resource in the model '
                "configuration.",
                Code.INVALID_ARGUMENT,
                field="instance_group",
            )
    return limits


def shown(limits: Mapping[Resource, int]) -> str:
    """Return ``limits`` in the form of Triton's log."""
    lines, device = ["", "Max Resource Map===>"], object()
    for resource, units in sorted(limits.items(), key=lambda item: item[0].order):
        if resource.device != device:
            device = resource.device
            lines.append(f"\tDevice: {'GLOBAL' if device is None else device}")
        lines.append(f"\t\tResource: {resource.name}\t Count: {units}")
    return "\n".join((*lines, ""))


def _operator_units(resource: Resource, operator_limits: Sequence[RateLimitResource]) -> int:
    """Return the units of ``resource`` that the operator has set; 0 if it is not named.

    As in Triton: the first value for a device counts, and so does the first value for all devices. Of the two, the
    larger one is returned.
    """
    named: dict[int | None, int] = {}
    for each in operator_limits:
        if each.name == resource.name:
            named.setdefault(each.device, each.count)
    counts = named.values() if resource.device is None else (named.get(resource.device, 0), named.get(None, 0))
    return max(counts, default=0)
