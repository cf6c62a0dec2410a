"""What a child does to a metric: small, frequent, and without an answer.

The body is the handle u64 and the value f64; the operation is the frame's count.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

from headrace.telemetry.kinds import MetricOperation
from headrace.workers.process.wire.failure import WireError
from headrace.workers.process.wire.frames import HEADER_BYTES, Frame, Kind, frame

_UPDATE = Struct("<Qd")
_OPERATIONS: Final[tuple[MetricOperation, ...]] = ("increment", "set", "observe")
_NUMBERS: Final = {operation: number for number, operation in enumerate(_OPERATIONS)}


def update_frame(metric: int, operation: MetricOperation, value: float) -> bytes:
    """A message that changes the metric of this handle."""
    return frame(Kind.UPDATE, _NUMBERS[operation], _UPDATE.pack(metric, value))


def read_update(message: Frame) -> tuple[int, MetricOperation, float]:
    """The handle, the operation and the value of an `update_frame`. Raises `WireError`."""
    if len(message.body) < HEADER_BYTES + _UPDATE.size or message.number >= len(_OPERATIONS):
        raise WireError(f"UPDATE: {len(message.body)} bytes, operation {message.number}")
    metric, value = _UPDATE.unpack_from(message.body, HEADER_BYTES)
    return metric, _OPERATIONS[message.number], value
