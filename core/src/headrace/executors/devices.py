"""The instances of a model, and the device of each (docs/spec/behaviours.md section 4.5)."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.backends.base import Backend, Device, DeviceKind
from headrace.config.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelRateLimiter
from headrace.errors import ConfigError

_KINDS: Mapping[int, DeviceKind] = {
    ModelInstanceGroup.KIND_CPU: "cpu",
    ModelInstanceGroup.KIND_GPU: "gpu",
    ModelInstanceGroup.KIND_MODEL: "model",
}


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource of the rate limiter: ``name`` on ``device``, or in the whole server if ``device`` is None.

    As in Triton, everything that is not on a GPU counts as device 0.
    """

    name: str
    device: int | None = None

    @property
    def order(self) -> tuple[int, str]:
        """The sort key: resources of the whole server are first."""
        return -1 if self.device is None else self.device, self.name


@dataclass(frozen=True, slots=True, eq=False)
class ResourceDemand:
    """The ``units`` of each resource that one instance needs while it executes. Compared and hashed by identity.

    The higher its ``priority``, from 1 on, the less often it runs.
    """

    units: Mapping[Resource, int] = field(default_factory=dict)
    priority: int = 1

    @classmethod
    def from_config(cls, limiter: ModelRateLimiter, device: Device) -> ResourceDemand:
        units = {
            Resource(each.name, None if getattr(each, "global") else device.id): each.count
            for each in limiter.resources
        }
        return cls(units, max(limiter.priority, 1))

    def overlaps(self, other: ResourceDemand) -> bool:
        """True if both need the same resource."""
        return not self.units.keys().isdisjoint(other.units)

    def __str__(self) -> str:
        return ", ".join(
            f"{units} of '{resource.name}'" + ("" if resource.device is None else f" on device {resource.device}")
            for resource, units in self.units.items()
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """One planned instance: its name, its device, and the resources of the rate limiter that it needs.

    ``signature`` is equal for two instances that are alike: same device, same group settings except name and count.
    """

    name: str
    device: Device
    demand: ResourceDemand = field(default_factory=ResourceDemand, compare=False)
    signature: tuple[bytes, Device] = (b"", Device())


@functools.cache
def available_gpus() -> tuple[int, ...]:
    """Return the GPUs that CUDA programs of this process would find, without loading CUDA."""
    if os.environ.get("TRITON_SERVER_CPU_ONLY"):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(range(_driver_gpus() if visible is None else _count_visible(visible, _driver_gpus())))


def _count_visible(visible: str, known: int) -> int:
    """Return how many of the ``known`` GPUs ``CUDA_VISIBLE_DEVICES`` (``visible``) allows.

    The first invalid entry ends the list. If an entry is there twice, no GPU is allowed.
    """
    entries: list[str] = []
    for entry in map(str.strip, visible.split(",")):
        is_index = entry.isdecimal() and int(entry) < known
        if not (is_index or (known and entry.startswith(("GPU-", "MIG-")))):
            break
        if entry in entries:
            return 0
        entries.append(entry)
    return len(entries)


def fill_groups(config: ModelConfig, backend: Backend, gpus: Sequence[int]) -> None:
    """Complete the name, kind, count and GPUs of every instance group of ``config``, in place.

    A config without groups gets one. Raises `ConfigError` for a device that the backend does not support.
    """
    if not config.instance_group:
        config.instance_group.add(name=config.name)
    for index, group in enumerate(config.instance_group):
        group.name = group.name or f"{config.name}_{index}"
        is_auto = group.kind == ModelInstanceGroup.KIND_AUTO
        if is_auto:
            on_gpu = bool(group.gpus or gpus) and "gpu" in backend.devices
            group.kind = ModelInstanceGroup.KIND_GPU if on_gpu else ModelInstanceGroup.KIND_CPU
        if group.kind == ModelInstanceGroup.KIND_GPU and not group.gpus:
            group.gpus.extend(gpus)
        is_cpu = group.kind == ModelInstanceGroup.KIND_CPU
        group.count = group.count or (backend.cpu_instances(config) if is_cpu else 1)
        if is_cpu and is_auto and backend.devices == ("gpu",):
            raise ConfigError(
                f"model {config.name} needs a GPU: backend '{backend.name}' runs on gpu, but no GPUs are available",
                field=f"instance_group[{index}].kind",
            )
        if _KINDS[group.kind] not in (*backend.devices, "model"):
            raise ConfigError(
                f"instance group {group.name} of model {config.name} has kind "
                f"{ModelInstanceGroup.Kind.Name(group.kind)}, but backend '{backend.name}' runs on "
                f"{', '.join(backend.devices)}",
                field=f"instance_group[{index}].kind",
            )


def plan_instances(config: ModelConfig) -> list[Placement]:
    """Return the instances of all groups, in order. Call `fill_groups` first.

    Passive groups are left out: they are never scheduled.
    """
    return [
        Placement(
            f"{group.name}_{number}", device, ResourceDemand.from_config(group.rate_limiter, device), (settings, device)
        )
        for group, settings in zip(config.instance_group, map(_settings_of_each, config.instance_group), strict=True)
        if not group.passive
        for number, device in enumerate(_devices(group))
    ]


def _settings_of_each(group: ModelInstanceGroup) -> bytes:
    """Return the settings of ``group`` that hold for each of its instances."""
    each = ModelInstanceGroup.FromString(group.SerializeToString())
    for field_name in ("name", "count", "gpus"):
        each.ClearField(field_name)
    return each.SerializeToString(deterministic=True)


def _devices(group: ModelInstanceGroup) -> list[Device]:
    """Return one device per instance: ``count`` on each GPU, or ``count`` in all."""
    if group.kind == ModelInstanceGroup.KIND_GPU:
        return [Device("gpu", gpu) for gpu in group.gpus for _ in range(group.count)]
    return [Device(_KINDS[group.kind])] * group.count


def _driver_gpus() -> int:
    """Return the number of GPUs of the NVIDIA driver; 0 without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        return count.value if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
