"""Which instances a model gets, and on which device each runs (behaviours.md section 4.5)."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.backends.base import Backend, Device
from penstock.config.model_config_pb2 import ModelConfig, ModelInstanceGroup
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """One instance to be: its name and its device."""

    name: str
    device: Device


@functools.cache
def available_gpus() -> tuple[int, ...]:
    """GPUs that CUDA programs of this process would see, without loading CUDA."""
    if os.environ.get("TRITON_SERVER_CPU_ONLY"):
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [entry for entry in visible.split(",") if entry.strip()]
        return () if "-1" in listed else tuple(range(min(len(listed), _driver_gpus())))
    return tuple(range(_driver_gpus()))


def plan_instances(config: ModelConfig, backend: Backend, gpus: Sequence[int]) -> list[Placement]:
    """The instances of all groups, in order. Passive ones are left out: they are never scheduled.

    Raises `ConfigError` when a group asks for a device that the backend does not run on.
    """
    groups = config.instance_group or [ModelInstanceGroup(name=config.name)]
    placements: list[Placement] = []
    for index, group in enumerate(groups):
        if not group.passive:
            placements += _plan_group(group, group.name or f"{config.name}_{index}", config.name, backend, gpus)
    return placements


def _plan_group(
    group: ModelInstanceGroup, name: str, model: str, backend: Backend, gpus: Sequence[int]
) -> list[Placement]:
    devices = _devices(group, backend, gpus)
    kind = devices[0].kind
    if kind != "model" and kind not in backend.devices:
        raise ConfigError(
            f"instance group {name} of model {model} has kind KIND_{kind.upper()}, but backend '{backend.name}' "
            f"runs on {', '.join(backend.devices)}"
        )
    count = group.count or (backend.default_cpu_instances if kind == "cpu" else 1)
    many = len(devices) > 1
    return [
        Placement(f"{name}_{number}" if not many else f"{name}_{number}_gpu{device.id}", device)
        for device in devices
        for number in range(count)
    ]


def _devices(group: ModelInstanceGroup, backend: Backend, gpus: Sequence[int]) -> list[Device]:
    on_gpus = [Device("gpu", gpu) for gpu in (group.gpus or gpus)]
    if group.kind == ModelInstanceGroup.KIND_MODEL:
        return [Device("model")]
    if group.kind == ModelInstanceGroup.KIND_GPU and on_gpus:
        return on_gpus
    if group.kind == ModelInstanceGroup.KIND_AUTO and on_gpus and "gpu" in backend.devices:
        return on_gpus
    return [Device("cpu")]


def _driver_gpus() -> int:
    """GPUs that the NVIDIA driver knows; 0 without one."""
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
