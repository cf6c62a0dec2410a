"""Inputs and outputs of requests in registered regions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from headrace import DeviceTensor, Spec, TensorLocation, TooLargeForLoop, dtypes
from headrace_shm.cuda_memory import StagedOutput
from headrace_shm.regions import RegionOwner
from headrace_shm.registration import RegionExtension

#: More bytes are copied on a thread.
_LARGE_BYTES = 64 * 1024


class RegionLocation(TensorLocation):
    """Shared memory that a client has registered."""

    name = "shared_memory_region"
    memory_name = "shared memory"
    extension: RegionExtension

    def source(self, parameters: Mapping[str, Any], tensor: Spec) -> memoryview:
        found, offset, size = self.extension.regions.find(parameters)
        # The lengths between strings are checked once, and must not change afterwards.
        is_read = tensor.datatype is not dtypes.BYTES and not self.extension.copies_inputs
        if size > _LARGE_BYTES and (found.is_copied or not is_read) and _on_event_loop():
            raise TooLargeForLoop
        return found.read(offset, size) if is_read else found.copy(offset, size)

    def target(self, parameters: Mapping[str, Any], tensor: Spec) -> memoryview:
        found, offset, size = self.extension.regions.find(parameters)
        return found.target(offset, size)

    def device_source(self, parameters: Mapping[str, Any], tensor: Spec) -> DeviceTensor | None:
        if self.extension.copies_inputs:
            return None
        found, offset, size = self.extension.regions.find(parameters)
        return found.tensor(offset, size, tensor)

    def device_target(self, memory: memoryview) -> Callable[[DeviceTensor], bool] | None:
        owner: Any = memory.obj
        return owner.base.take if isinstance(owner.base, StagedOutput) else None

    def finish(self, memory: Any, written: int) -> None:
        owner: RegionOwner | None = memory.obj.base
        if owner is not None:  # the input was not copied
            owner.finish(memory, written)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
