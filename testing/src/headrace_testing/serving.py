"""A server in this process, and clients for every frontend."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np
import pytest

from headrace import BytesTensor, DataType, Server, Tensor, as_tensor, data_type, dtypes

T = TypeVar("T")

#: The protocol of a request. ``python`` is `Server.infer`.
Way: TypeAlias = Literal["python", "http-json", "http-binary", "grpc"]
WAYS: tuple[Way, ...] = ("python", "http-json", "http-binary", "grpc")

#: Data types that JSON cannot carry (docs/spec/behaviours.md section 3.1).
NOT_IN_JSON = (dtypes.FP16, dtypes.BF16)
TIMEOUT_S = 60


@contextmanager
def serve(repository: Path, listen: bool = False, **options: Any) -> Iterator[Server]:
    """Yield a running server over ``repository``.

    With ``listen``, it serves HTTP and gRPC on free ports of 127.0.0.1, which are then in its options.
    """
    with ExitStack() as stack:
        if listen:
            local = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1", "allow_metrics": False}
            options = local | {"http_port": 0, "grpc_port": 0} | options
        server = stack.enter_context(Server(repository, **options))
        if listen:
            on_loop(server, server.start_frontends())
            ports: dict[str, Any] = {
                f"{part.protocol}_port": port_of(server, part.name) for part in server.frontends if part.protocol
            }
            server.options = replace(server.options, **ports)
        yield server


def port_of(server: Server, frontend: str) -> int:
    """Return the port on which the frontend named ``frontend`` listens."""
    (port,) = [part.port for part in server.frontends if part.name == frontend]  # type: ignore[attr-defined]
    return int(port)


def on_loop(server: Server, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``, run on the server's event loop."""
    return asyncio.run_coroutine_threadsafe(work, server.loop).result(TIMEOUT_S)


def blocked_s(server: Server, act: Callable[[], object], limit_s: float) -> float:
    """Return the longest time in s that ``act`` blocks the event loop of ``server``.

    It is measured up to 3 times, until it is below ``limit_s``: the machine may be busy. The smallest counts.
    """
    shortest = math.inf
    for _ in range(3):
        started, ended, gaps = threading.Event(), threading.Event(), [0.0]
        watch = asyncio.run_coroutine_threadsafe(_measure_gaps(started, ended, gaps), server.loop)
        try:
            started.wait(TIMEOUT_S)  # otherwise ``act`` may block the loop before the first measurement
            act()
        finally:
            ended.set()
            watch.result(TIMEOUT_S)
        shortest = min(shortest, max(gaps))
        if shortest < limit_s:
            break
    return shortest


async def _measure_gaps(started: threading.Event, ended: threading.Event, gaps: list[float]) -> None:
    """Set ``started``, then add the time of each turn of the event loop to ``gaps``, until ``ended`` is set."""
    started.set()
    while not ended.is_set():
        begun = time.perf_counter()
        await asyncio.sleep(0.005)
        gaps.append(time.perf_counter() - begun)


def infer(server: Server, model: str, inputs: Mapping[str, Any], over: Way = "python") -> dict[str, Tensor]:
    """Return the outputs of ``model``, requested by ``over``. Raises the client's errors."""
    tensors = {name: as_tensor(value) for name, value in inputs.items()}
    if over == "python":
        return dict(server.infer(model, tensors).outputs)
    if over == "grpc":
        return _infer_by_client(_client("grpc"), f"127.0.0.1:{server.options.grpc_port}", server, model, tensors, {})
    options = {"binary_data": over == "http-binary"}
    return _infer_by_client(_client("http"), f"127.0.0.1:{server.options.http_port}", server, model, tensors, options)


def _client(kind: str) -> ModuleType:
    reason = f"the package tritonclient[{kind}] is not installed"
    module: ModuleType = pytest.importorskip(f"tritonclient.{kind}", reason=reason)
    return module


def _infer_by_client(
    client: ModuleType, url: str, server: Server, model: str, tensors: Mapping[str, Tensor], options: dict[str, bool]
) -> dict[str, Tensor]:
    specs = server.resolve(model).outputs
    inputs = []
    for name, tensor in tensors.items():
        inputs.append(client.InferInput(name, list(tensor.shape), data_type(tensor).name))
        inputs[-1].set_data_from_numpy(_to_client(tensor), **options)
    wanted = [client.InferRequestedOutput(name, **options) for name in specs]
    with client.InferenceServerClient(url) as connection:
        result = connection.infer(model, inputs, outputs=wanted)
    return {name: _from_client(result.as_numpy(name), spec.datatype) for name, spec in specs.items()}


def _to_client(tensor: Tensor) -> np.ndarray[Any, Any]:
    if isinstance(tensor, BytesTensor):
        return tensor.to_objects()
    return tensor.astype(np.float32) if data_type(tensor) is dtypes.BF16 else tensor


def _from_client(array: np.ndarray[Any, Any], datatype: DataType) -> Tensor:
    # The client returns BF16 as float32, and strings as bytes or, from JSON, as str.
    return as_tensor(array.astype(datatype.numpy) if datatype is dtypes.BF16 else array)
