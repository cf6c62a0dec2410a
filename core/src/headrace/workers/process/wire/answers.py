"""Answers in a message::

    call u64 | status u8 | final u8 | code u8 | spare u8 | outputs u16 | lengths u32[2] of the texts
    texts (the message of an error, and parameters), then outputs (`headrace.workers.process.wire.tensors`)

In front of those of a batch, in `Kind.DONE`, are its `Times`, each u64.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from struct import error as StructError  # noqa: N812
from typing import Final, NamedTuple

from headrace.errors import (
    AlreadyExists,
    BackendError,
    Cancelled,
    Code,
    HeadraceError,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import Tensor, as_tensor
from headrace.workers.process.wire import settings
from headrace.workers.process.wire.failure import WireError
from headrace.workers.process.wire.frames import HEADER_BYTES, Buffer, Frame
from headrace.workers.process.wire.tensors import TensorReader, TensorWriter

_ANSWER = Struct("<QBBBxHII")
TIMES: Final = Struct("<QQQQ")


class Status(IntEnum):
    """What an answer is."""

    RESPONSE = 0
    ERROR = 1
    NOTHING = 2
    LATER = 3


class Reply(NamedTuple):
    """An answer as it travels. ``answer`` is None for NOTHING and for LATER."""

    call: int
    status: Status
    final: bool
    answer: InferResponse | HeadraceError | None


class Times(NamedTuple):
    """`headrace.telemetry.statistics.BatchTimes` as it travels; one clock for all processes."""

    start_ns: int
    input_end_ns: int
    infer_end_ns: int
    end_ns: int


def reply_of(call: int, answer: Answer, final: bool) -> Reply:
    """``answer`` to ``call``."""
    if isinstance(answer, InferResponse):
        return Reply(call, Status.RESPONSE, final, answer)
    return Reply(call, Status.NOTHING if answer is None else Status.ERROR, final, answer)


def unsendable_reply(reply: Reply, error: Exception) -> Reply:
    """What is sent in the place of ``reply``, which cannot be written."""
    return reply_of(reply.call, HeadraceError(f"the response cannot be sent: {error}", Code.INTERNAL), reply.final)


def read_times(message: Frame) -> Times:
    """The times of a `Kind.DONE`. Raises `WireError`."""
    try:
        return Times(*TIMES.unpack_from(message.body, HEADER_BYTES))
    except StructError as error:
        raise WireError(f"DONE: {error}") from error


_NUMBERS: Final = {code: number for number, code in enumerate(Code)}
#: The class of an error that has travelled, by the number of its code.
_ERRORS: Final = {
    _NUMBERS[kind.code]: kind
    for kind in (
        HeadraceError,
        BackendError,
        NotFound,
        InvalidArgument,
        Unavailable,
        Unsupported,
        AlreadyExists,
        Cancelled,
    )
}


class AnswerWriter:
    """Writes answers, whose outputs ``tensors`` writes."""

    def __init__(self, tensors: TensorWriter) -> None:
        self._tensors = tensors

    def write(self, reply: Reply, meta: list[bytes], data: list[Buffer], size: int) -> int:
        """Append ``reply`` to a message with ``size`` bytes of data; returns how many it has then."""
        answer = reply.answer
        if isinstance(answer, InferResponse):
            rare = settings.pack_parameters(answer.parameters) if answer.parameters else b""
            meta.append(_ANSWER.pack(reply.call, reply.status, reply.final, 0, len(answer.outputs), 0, len(rare)))
            meta.append(rare)
            for name, value in answer.outputs.items():
                size = self._tensors.write(name, as_tensor(value), meta, data, size)
            return size
        text = b"" if answer is None else answer.message.encode(errors="replace")
        code = 0 if answer is None else _NUMBERS[answer.code]
        meta.append(_ANSWER.pack(reply.call, reply.status, reply.final, code, 0, len(text), 0))
        meta.append(text)
        return size


class AnswerReader:
    """Reads answers, whose outputs ``tensors`` reads."""

    def __init__(self, tensors: TensorReader) -> None:
        self._tensors = tensors

    def read(self, message: Frame, position: int) -> tuple[Reply, int]:
        """The answer at ``position``, and where it ends. Raises `WireError`, and other errors at nonsense."""
        body = message.body
        call, status, final, code, count, text_size, rare_size = _ANSWER.unpack_from(body, position)
        position += _ANSWER.size
        texts = position + text_size + rare_size
        if texts > message.data:
            raise WireError(f"{message.kind.name}: texts run past the meta")
        if status == Status.RESPONSE:
            parameters = settings.unpack(bytes(body[texts - rare_size : texts])) if rare_size else {}
            position = texts
            outputs: dict[str, Tensor] = {}
            for _ in range(count):
                name, outputs[name], position = self._tensors.read(message, position)
            return Reply(call, Status.RESPONSE, bool(final), InferResponse(outputs, parameters)), position
        error = None
        if status == Status.ERROR:
            error = _ERRORS[code](str(body[position : position + text_size], "utf-8"))
        return Reply(call, Status(status), bool(final), error), texts
