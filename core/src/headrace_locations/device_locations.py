"""Tensors of requests on a device, in locations that have such memory, for models that take device tensors.

They are read where they lie, and outputs are copied within the device. All other models get and return arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace.errors import HeadraceError
from headrace.messages.device_tensor import DeviceTensor
from headrace.messages.request import Undecoded
from headrace.messages.spec import Spec
from headrace.messages.tensor import Tensor
from headrace.off_loop import UNBOUNDED, TooLargeForLoop
from headrace_locations.tensor_locations import (
    LocatedTensors,
    Parameters,
    Target,
    TensorLocation,
    TensorLocations,
    fault,
)


class DeviceTarget(Target):
    """The place of an output that is on a device: ``copy`` is the result of `TensorLocation.device_target`."""

    __slots__ = ("_copy",)

    def __init__(self, location: TensorLocation, memory: memoryview, copy: Callable[[DeviceTensor], bool]) -> None:
        super().__init__(location, memory)
        self._copy = copy

    def write(self, name: str, tensor: Any, loop_limit_bytes: int = UNBOUNDED) -> None:
        """Do as `Target.write`. A `DeviceTensor` of any size raises `TooLargeForLoop` on the event loop."""
        if isinstance(tensor, DeviceTensor) and tensor.nbytes <= self.memory.nbytes:
            if loop_limit_bytes < UNBOUNDED:  # the copy waits for the device
                raise TooLargeForLoop
            try:
                if self._copy(tensor):
                    return
                tensor = tensor.to_host()
            except HeadraceError:
                raise
            except BaseException as error:
                raise fault(self.location, f"output '{name}'", error) from None
        super().write(name, tensor, loop_limit_bytes)


class DeviceLocations(TensorLocations):
    """The locations of one server, for requests to a model that takes device tensors."""

    def read(
        self, location: TensorLocation, parameters: Parameters, spec: Spec, located: LocatedTensors
    ) -> Tensor | Undecoded:
        if spec.name not in located.device_inputs:
            return super().read(location, parameters, spec, located)
        try:
            tensor: Any = location.device_source(parameters, spec)
        except HeadraceError:
            raise
        except BaseException as error:
            raise fault(location, f"input '{spec.name}'", error) from None
        if tensor is None:
            return super().read(location, parameters, spec, located)
        located.inputs.append((location, parameters, spec))
        return tensor  # type: ignore[no-any-return]  # `ModelView.takes_device_tensors`

    def target(self, location: TensorLocation, parameters: Parameters, spec: Spec, located: LocatedTensors) -> Target:
        target = super().target(location, parameters, spec, located)
        try:
            copy = location.device_target(target.memory)
        except BaseException as error:
            raise fault(location, f"output '{spec.name}'", error) from None
        if copy is not None:
            located.targets[spec.name] = target = DeviceTarget(location, target.memory, copy)
            located.on_device = {**(located.on_device or {}), spec.name: False}
        return target


def on_device(locations: TensorLocations) -> TensorLocations:
    """Return ``locations`` for requests to models that take device tensors: the same if none has such memory."""
    for each in locations.all:
        kind = type(each)
        if (
            kind.device_source is not TensorLocation.device_source
            or kind.device_target is not TensorLocation.device_target
        ):
            return DeviceLocations(locations.all)
    return locations
