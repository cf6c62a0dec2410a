"""The shadow of a router: a model that gets copies of some requests. Its outputs are compared.

A copy is sent after the caller has its answer. The caller never waits for it and never gets its errors. At most
``limit`` copies of at most 256 MiB are in flight or being compared. Others are dropped and counted. Outputs are
compared on a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from headrace import Answer, BytesTensor, HeadraceError, InferRequest, InferResponse, OtherModel, Tensor, Ticket
from headrace_router.differences import Difference, Tolerance, compare
from headrace_router.routing_table import RouteTarget

log = logging.getLogger("headrace.router")

SAME: Final = "same"
DIFFERENT: Final = "different"
FAILED: Final = "failed"
DROPPED: Final = "dropped"
OUTCOMES: Final = (SAME, DIFFERENT, FAILED, DROPPED)
_MAX_BYTES = 256 << 20
_ONE = 1 << 64
_STEP = 0x9E3779B97F4A7C15


@dataclass(slots=True, eq=False)
class Copy:
    """A request that is copied, with ``inputs`` that do not change any more.

    ``changing`` is the memory of the inputs that may change: some models answer with views of it.
    """

    request: InferRequest
    inputs: Mapping[str, Any]
    size: int
    changing: Sequence[Any] = ()


class Shadow:
    """Copies a ``fraction`` of the requests to ``target``. Event loop only."""

    def __init__(
        self, router: str, target: RouteTarget, other: OtherModel, fraction: float, tolerance: Tolerance
    ) -> None:
        self.label, self.fraction = target.label, fraction
        self.limit = 64
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.differences: dict[str, Difference] = {}
        self._router, self._name, self._version, self._ask = router, target.dependency.model, target.version, other.ask
        self._outputs = tuple(other.outputs)
        self._tolerance = tolerance
        self._point = 0
        self._running: dict[Copy, Ticket | None] = {}
        self._bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._is_closed = False

    def take(self, request: InferRequest) -> Copy | None:
        """Return a copy of ``request`` if it is one of the fraction, and not dropped."""
        self._point = (self._point + _STEP) % _ONE
        if self._point >= self.fraction * _ONE or self._is_closed:
            return None
        size = sum([getattr(tensor, "nbytes", 0) for tensor in request.inputs.values()])
        if len(self._running) >= self.limit or self._bytes + size > _MAX_BYTES:
            self.outcomes[DROPPED] += 1
            return None
        inputs = {name: _fixed(tensor) for name, tensor in request.inputs.items()}
        changing = [_memory(tensor) for name, tensor in request.inputs.items() if inputs[name] is not tensor]
        copy = Copy(request, inputs, size, changing)
        self._running[copy] = None
        self._bytes += size
        return copy

    def release(self, copy: Copy) -> None:
        """Forget ``copy``: it is compared, or is not sent because its request has no response."""
        if copy in self._running:
            del self._running[copy]
            self._bytes -= copy.size

    def keep(self, copy: Copy, outputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return ``outputs`` for `send`: views of mutable inputs are copied."""
        if not copy.changing:
            return outputs
        shared = {
            name: any(np.may_share_memory(_memory(tensor), each) for each in copy.changing)
            for name, tensor in outputs.items()
        }
        return {name: _fixed(tensor) if shared[name] else tensor for name, tensor in outputs.items()}

    def send(self, copy: Copy, outputs: Mapping[str, Tensor]) -> None:
        """Send ``copy`` soon, and compare the response with ``outputs``."""
        asyncio.get_running_loop().call_soon(self._send, copy, outputs)

    def _send(self, copy: Copy, outputs: Mapping[str, Tensor]) -> None:
        request = copy.request
        request_copy = InferRequest(
            self._name,
            copy.inputs,
            () if len(outputs) == len(self._outputs) else tuple(outputs),
            request.id,
            self._version,
            request.parameters,
            callers=(*request.callers, self._router),
            caller=request,
        )
        call = Ticket(request_copy, partial(self._answered, copy, outputs))
        if self._is_closed:
            self._failed(copy)
            return
        self._running[copy] = call
        try:
            self._ask(call)
        except HeadraceError as error:
            log.debug("router '%s': shadow '%s' refuses a request: %s", self._router, self.label, error.message)
            self._failed(copy)

    def _answered(self, copy: Copy, outputs: Mapping[str, Tensor], answer: Answer, final: bool) -> None:
        if copy not in self._running or not final:
            return
        if not isinstance(answer, InferResponse) or self._is_closed:
            self._failed(copy)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="router-shadow")
        loop = asyncio.get_running_loop()
        comparing = loop.run_in_executor(self._thread, compare, outputs, answer.outputs, self._tolerance)
        comparing.add_done_callback(partial(self._compared, copy))

    def _compared(self, copy: Copy, comparing: asyncio.Future[dict[str, Difference]]) -> None:
        if comparing.cancelled() or comparing.exception() is not None:
            if not comparing.cancelled():
                log.error("router '%s': outputs can not be compared", self._router, exc_info=comparing.exception())
            self._failed(copy)
            return
        found = comparing.result()
        for name, difference in found.items():
            self.differences.setdefault(name, Difference()).add(difference)
        self.outcomes[DIFFERENT if any(each.beyond for each in found.values()) else SAME] += 1
        self.release(copy)

    def _failed(self, copy: Copy) -> None:
        self.outcomes[FAILED] += 1
        self.release(copy)

    def close(self) -> None:
        """Cancel what is on its way."""
        self._is_closed = True
        for call in tuple(self._running.values()):
            if call is not None:
                call.cancel()
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def status(self) -> dict[str, Any]:
        """Return what is copied and how the outputs differ, as JSON."""
        return {
            "name": self.label,
            "fraction": self.fraction,
            "in_flight": len(self._running),
            "requests": dict(self.outcomes),
            "outputs": {
                name: {
                    "elements": each.elements,
                    "beyond_tolerance": each.beyond,
                    "mean_relative_difference": each.mean_relative,
                    "largest_difference": each.largest,
                }
                for name, each in self.differences.items()
            },
        }


def _memory(tensor: Any) -> Any:
    return np.frombuffer(tensor.buffer, np.uint8) if isinstance(tensor, BytesTensor) else tensor


def _fixed(tensor: Any) -> Any:
    """Return ``tensor``, or a copy if its memory may change when the answer is sent: it is not that of ``bytes``."""
    if isinstance(tensor, BytesTensor):
        is_fixed = isinstance(tensor.buffer.obj, bytes)
        return tensor if is_fixed else BytesTensor(bytes(tensor.buffer), tensor.shape)
    base: Any = tensor
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return tensor.copy() if isinstance(tensor, np.ndarray) and not isinstance(base, bytes) else tensor
