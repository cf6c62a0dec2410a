"""CUDA streams and events that the host plays: PyTorch itself, whose streams are threads.

Tensors are on the CPU, and operators run at once. What a test puts into a stream by `PlayedStream.put` runs later, in
order, as kernels do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from google.protobuf import text_format
from torch.utils._python_dispatch import TorchDispatchMode

from headrace import Device, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_torch import Parameters
from headrace_torch.instance import Forward, ForwardInstance
from headrace_torch.pinned_memory import PinnedArrays

CONFIG = (
    'name: "m" max_batch_size: 64 input { name: "x" data_type: TYPE_FP32 dims: 4 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 4 }'
)


class PlayedEvent:
    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking
        self.is_complete = threading.Event()

    def record(self, stream: PlayedStream) -> None:
        stream.put(self.is_complete.set)

    def query(self) -> bool:
        return self.is_complete.is_set()

    def synchronize(self) -> None:
        assert self.is_complete.wait(10), "the stream does not get there"


class PlayedStream:
    def __init__(self, device: object = None) -> None:
        self.device = torch.device("cpu")
        self._work = ThreadPoolExecutor(1)

    def put(self, work: Callable[[], object]) -> None:
        self._work.submit(work)

    def record_event(self) -> PlayedEvent:
        event = PlayedEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def wait_event(self, event: PlayedEvent) -> None:
        self.put(event.synchronize)


class _OnDevice(torch.Tensor):
    def record_stream(self, stream: object) -> None:
        """The CPU's allocator has no streams."""


class _Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operators, and refuses to wait for the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function) in ("aten.item.default", "aten._local_scalar_dense.default"):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")
        result = function(*args, **(kwargs or {}))
        self.done.append((function, args, kwargs or {}, result))
        return result


class PlayedGraph:
    """Runs the captured operators again on the same memory. ``captured`` has all graphs."""

    captured: ClassVar[list[PlayedGraph]] = []

    def __init__(self) -> None:
        self.tape = _Tape()
        self.replays = 0
        self.captured.append(self)

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.tape.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        self.tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs, result in self.tape.done:
            again = function(*args, **kwargs)
            if isinstance(again, torch.Tensor) and again.data_ptr() != result.data_ptr():
                result.copy_(again)


class PlayedTorch:
    """The module ``torch`` with a simulated device. ``current`` has each stream that was made the current one."""

    def __init__(self) -> None:
        self.current: list[PlayedStream] = []
        self.cuda = SimpleNamespace(
            Stream=PlayedStream,
            Event=PlayedEvent,
            CUDAGraph=PlayedGraph,
            stream=self._stream,
            current_stream=PlayedStream,
            graph_pool_handle=object,
            synchronize=lambda: None,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def from_numpy(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).as_subclass(_OnDevice)

    @contextmanager
    def _stream(self, stream: PlayedStream) -> Iterator[None]:
        self.current.append(stream)
        yield


class Played:
    """An instance on a GPU that is played. It runs ``run``, or doubles ``x``: that lasts until `finish`, unless
    ``runs_until_finish`` is False."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        more: str = "",
        run: Callable[..., Any] | None = None,
        forward: Mapping[str, Any] | None = None,
        **parameters: Any,
    ) -> None:
        self.torch, self.stream = PlayedTorch(), PlayedStream()
        self.runs_until_finish = False
        self.gates: list[threading.Event] = []
        self.pinned: list[np.ndarray[Any, Any]] = []
        self.pool = PinnedArrays(1 << 24, self._allocate)
        monkeypatch.setattr("headrace_torch.tensor_conversion.stays", lambda device: True)
        config = text_format.Parse(CONFIG + more, ModelConfig())
        model = Model("m", 1, None, config, Parameters(**parameters), None, "m_0", Device("gpu"))  # type: ignore[arg-type]
        fields: Any = {"arguments": ["x"], "changes": False, **(forward or {})}
        made = Forward(run=run or self._run, device="cpu", **fields)
        self.instance = ForwardInstance(
            self.torch, made, model, ["x"], ["y"], owns=True, stream=self.stream, pinned=self.pool
        )

    def _allocate(self, size: int) -> Any:
        self.pinned.append(np.zeros(size, np.uint8))
        return self.pinned[-1]

    def _run(self, x: Any) -> Any:
        if x.flatten()[0] == 13:
            raise RuntimeError("unlucky")
        if self.runs_until_finish:
            self.gates.append(gate := threading.Event())
            self.stream.put(lambda: gate.wait(10))
        return x * 2

    def finish(self) -> None:
        self.gates.pop(0).set()

    def call(self, x: Any) -> Any:
        """Execute and copy to the host, as core does."""
        result: Any = self.instance.execute({"x": x})["y"]
        return result.to_host()
