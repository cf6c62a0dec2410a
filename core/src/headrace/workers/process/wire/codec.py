"""Whole messages of requests and of answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import error as StructError  # noqa: N812
from typing import Final

from headrace.messages.request import InferRequest
from headrace.workers.process.wire.answers import TIMES, AnswerReader, AnswerWriter, Reply, Times
from headrace.workers.process.wire.failure import WireError
from headrace.workers.process.wire.frames import HEADER_BYTES, Buffer, Frame, Kind, data_frame
from headrace.workers.process.wire.requests import Make, RequestReader, RequestWriter
from headrace.workers.process.wire.tensors import Places, TensorReader, TensorWriter, Views

#: What reading a message that makes no sense may raise.
_NONSENSE: Final = (StructError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


class Encoder:
    """Writes requests and answers. ``places`` is the arena of this side, or None. One thread at a time."""

    def __init__(self, places: Places | None) -> None:
        self._tensors = tensors = TensorWriter(places)
        self._requests, self._answers = RequestWriter(tensors), AnswerWriter(tensors)

    def requests(self, kind: Kind, batch: Sequence[tuple[int, InferRequest]]) -> bytes:
        """A frame of requests, each under the number of its call. Raises `ValueError` for what cannot travel."""
        meta: list[bytes] = []
        data: list[Buffer] = []
        size = 0
        self._tensors.placed.clear()
        try:
            for call, request in batch:
                size = self._requests.write(call, request, kind is Kind.INFER, meta, data, size)
            return data_frame(kind, len(batch), meta, data, size)
        except Exception as error:
            raise self._undone(error) from error

    def answers(self, kind: Kind, replies: Sequence[Reply], times: Times | None = None) -> bytes:
        """A frame of answers; `Kind.DONE` has ``times``. Raises `ValueError` for what cannot travel."""
        meta: list[bytes] = [] if times is None else [TIMES.pack(*times)]
        data: list[Buffer] = []
        size = 0
        self._tensors.placed.clear()
        try:
            for reply in replies:
                size = self._answers.write(reply, meta, data, size)
            return data_frame(kind, len(replies), meta, data, size)
        except Exception as error:
            raise self._undone(error) from error

    def _undone(self, error: Exception) -> ValueError:
        """``error`` for the caller; a message that is not sent leaves nothing in the arena."""
        self._tensors.take_back()
        return ValueError(str(error) or type(error).__name__)


class Decoder:
    """Reads requests and answers. ``views`` is the peer's arena, or None; ``free`` is called with an
    offset in it, on any thread, once nobody looks at what is there."""

    def __init__(self, views: Views | None, free: Callable[[int], None]) -> None:
        tensors = TensorReader(views, free)
        self._requests, self._answers = RequestReader(tensors), AnswerReader(tensors)

    def requests(self, message: Frame, make: Make) -> list[InferRequest]:
        """The requests of a frame, each made by ``make``. Raises `WireError`."""
        try:
            requests = []
            position = HEADER_BYTES
            for _ in range(message.number):
                request, position = self._requests.read(message, position, make)
                requests.append(request)
        except _NONSENSE as error:
            raise WireError(f"{message.kind.name}: {type(error).__name__}: {error}") from error
        return requests

    def answers(self, message: Frame) -> list[Reply]:
        """The answers of a frame. Raises `WireError`."""
        try:
            replies = []
            position = HEADER_BYTES + (TIMES.size if message.kind is Kind.DONE else 0)
            for _ in range(message.number):
                reply, position = self._answers.read(message, position)
                replies.append(reply)
        except _NONSENSE as error:
            raise WireError(f"{message.kind.name}: {type(error).__name__}: {error}") from error
        return replies
