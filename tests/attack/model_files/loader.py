"""A server in a process of its own that loads the model ``m`` whenever it is told to, and says what came of it.

``python loader.py REPOSITORY`` reads a line for each time, and writes one of JSON: ``outcome`` (``refused``,
``answered``, ``failed``: the last is an inference that was refused), what was ``said``, and how ``late_ms`` the
event loop was at most. Told to stdout only: engines write to stderr. What it must not do, it notes as ``did``.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace import HeadraceError, Server
from headrace.messages.tensor import BytesTensor

#: Beyond what the engines have taken when it begins, so that a mutant does not take the machine.
MOST_BYTES = 4 << 30
#: Of an input.
_MOST_ELEMENTS = 1 << 20
_FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect",
              "pty.spawn")  # fmt: skip
_did: list[str] = []
_SAID = 1


class _Heartbeat:
    """Measures the largest delay of the event loop, in milliseconds."""

    def __init__(self) -> None:
        self.late_ms = 0.0

    async def beat(self) -> None:
        while True:
            due = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            self.late_ms = max(self.late_ms, (time.monotonic() - due) * 1e3)


async def _try(server: Server) -> dict[str, Any]:
    try:
        await server.load("m")
    except HeadraceError as error:
        return {"outcome": "refused", "said": str(error)}
    try:
        inputs = _inputs(server)
        if inputs is None:
            return {"outcome": "answered", "said": "its inputs are too large to be tried"}
        response = await server.infer_async("m", inputs)
        return {"outcome": "answered", "said": str({name: array.shape for name, array in response.outputs.items()})}
    except HeadraceError as error:
        return {"outcome": "failed", "said": str(error)}
    finally:
        await server.unload("m")
        while any(entry.state != "UNAVAILABLE" for entry in server.index() if entry.name == "m"):
            await asyncio.sleep(0.001)


def _inputs(server: Server) -> dict[str, Any] | None:
    found: dict[str, Any] = {}
    served = server.resolve("m")
    rows = [min(2, served.config.max_batch_size)] if served.config.max_batch_size else []
    for spec in served.inputs.values():
        shape = [*rows, *(2 if size < 0 else size for size in spec.dims)]
        if np.prod([float(size) for size in shape]) > _MOST_ELEMENTS:
            return None
        if spec.datatype.name == "BYTES":
            found[spec.name] = BytesTensor.from_objects(np.full(shape, b"text", dtype=object))
        else:
            found[spec.name] = np.ones(shape, spec.datatype.numpy)
    return found


async def _serve(repository: Path) -> None:
    heartbeat = _Heartbeat()
    async with Server(repository, model_control_mode="explicit", exit_timeout_secs=5) as server:
        beating = asyncio.create_task(heartbeat.beat())
        while await asyncio.to_thread(sys.stdin.readline):
            heartbeat.late_ms = 0.0
            _did.clear()
            outcome = await _try(server)
            outcome |= {"late_ms": heartbeat.late_ms, "did": list(_did)}
            os.write(_SAID, json.dumps(outcome).encode() + b"\n")
            _limit()
        beating.cancel()


def _limit() -> None:
    """Limit a resource to what is used now and a margin."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_BYTES, resource.RLIM_INFINITY))


def _note(event: str, arguments: Any) -> None:
    if event in _FORBIDDEN:
        _did.append(f"{event} {arguments!r}"[:200])


if __name__ == "__main__":
    _SAID = os.dup(1)
    os.dup2(2, 1)
    faulthandler.enable()
    sys.addaudithook(_note)
    asyncio.run(_serve(Path(sys.argv[1])))
