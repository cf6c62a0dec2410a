"""Registers regions and unregisters them, if the server allows it: what routes and methods of both protocols do."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, ClassVar

from headrace import Engine, Extension, OptionGroup, Unsupported
from headrace_shm.cuda_memory import open_region
from headrace_shm.regions import Kind, Region, Regions

_NOT_ALLOWED = "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."


@dataclass(frozen=True)
class ShmOptions(OptionGroup):
    """Shared memory of clients, with --allow-client-shm=true."""

    name: ClassVar[str] = "shm"
    max_regions: int = field(default=1024, metadata={"help": "Maximum number of registered regions."})
    key_prefix: str = field(
        default="", metadata={"help": "Only segments with this prefix of the key may be registered. Empty: all."}
    )
    copy_inputs: bool = field(
        default=False,
        metadata={"help": "Copy every input, so that a client can not change it while a model reads it."},
    )

    def __post_init__(self) -> None:
        if not 1 <= self.max_regions <= 32768:  # Linux allows 65530 mappings per process
            raise ValueError(f"--shm-max-regions is {self.max_regions}, not 1 to 32768")


class RegionExtension(Extension):
    """The regions of one server."""

    name = "shm"
    announces = ("system_shared_memory", "cuda_shared_memory")
    options = (ShmOptions,)

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        options = engine.options.group(ShmOptions)
        self.regions = Regions(options.max_regions)
        self.copies_inputs, self._key_prefix = options.copy_inputs, options.key_prefix
        #: True if clients may register and unregister regions.
        self.is_allowed = engine.options.allow_client_shm

    def require_allowed(self) -> None:
        """Raise `Unsupported` unless `is_allowed`."""
        if not self.is_allowed:
            raise Unsupported(_NOT_ALLOWED)

    async def register_system(self, name: str, key: str, offset: int, size: int) -> None:
        """Register a part of the POSIX segment ``key``, in all workers. Raises `HeadraceError`."""
        await self.engine.share(self, name, ["system", name, size, key, offset])

    async def register_cuda(self, name: str, handle: bytes, device: int, size: int) -> None:
        """Register memory of a GPU by its IPC handle, in all workers. Raises `HeadraceError`."""
        await self.engine.share(self, name, ["cuda", name, size, handle.hex(), device])

    async def unregister(self, kind: Kind, name: str) -> None:
        """Unregister the region ``name``, or all of ``kind``, in all workers. Raises `HeadraceError`."""
        self.require_allowed()
        for each in [name] if name else [region.name for region in self.regions.listed(kind)]:
            await self.engine.share(self, each, ["unregister", each, kind], is_kept=False)

    async def apply(self, change: list[Any]) -> None:
        from headrace_shm.segments import register_segment

        match change:
            case ["system", name, size, key, offset]:
                self.regions.check(name)
                memory = register_segment(name, key, offset, size, self._key_prefix)
                status = {"key": key, "offset": offset, "byte_size": size}
                self.regions.add(Region("system", name, size, status, memory))
            case ["cuda", name, size, handle, device]:
                self.regions.check(name)
                opened = await asyncio.to_thread(open_region, name, bytes.fromhex(handle), device, size)
                self.regions.check(name)  # another call may have registered it
                self.regions.add(Region("cuda", name, size, {"device_id": device, "byte_size": size}, opened))
            case [_, name, kind]:
                self.regions.remove(kind, name)

    def close(self) -> None:
        self.regions.clear()
