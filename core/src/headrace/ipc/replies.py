"""Answers to requests as they travel between processes: what an answer is, and what is said in the place of one that
cannot travel."""

from __future__ import annotations

from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from headrace.errors import (
    AlreadyExists,
    BackendError,
    Cancelled,
    Code,
    HeadraceError,
    InvalidArgument,
    NotFound,
    Rescheduled,
    Unavailable,
    Unsupported,
)
from headrace.messages.response import Answer, InferResponse


class AnswerStatus(IntEnum):
    """What an answer is."""

    RESPONSE = 0
    ERROR = 1
    NOTHING = 2
    LATER = 3
    RESCHEDULED = 4


class Reply(NamedTuple):
    """An answer as it travels. ``answer`` is None for NOTHING and for LATER."""

    call: int
    status: AnswerStatus
    final: bool
    answer: InferResponse | HeadraceError | None


#: The boundaries of one execution as they travel, in nanoseconds of the clock that all processes share: it began, its
#: inputs were put together, the engine returned, the answers were taken apart.
Times: TypeAlias = tuple[int, int, int, int]


def reply_of(call: int, answer: Answer, final: bool) -> Reply:
    """``answer`` to ``call``."""
    if isinstance(answer, InferResponse):
        return Reply(call, AnswerStatus.RESPONSE, final, answer)
    if isinstance(answer, Rescheduled):
        return Reply(call, AnswerStatus.RESCHEDULED, final, answer)
    if answer is None:
        return Reply(call, AnswerStatus.NOTHING, final, None)
    return Reply(call, AnswerStatus.ERROR, final, answer)


def unsendable_reply(reply: Reply, error: Exception) -> Reply:
    """What is sent in the place of ``reply``, which cannot be written."""
    return reply_of(reply.call, HeadraceError(f"the response cannot be sent: {error}", Code.INTERNAL), reply.final)


def unsendable_request(error: Exception) -> HeadraceError:
    """What a model is told whose request cannot be written: a value that cannot travel is its mistake."""
    return HeadraceError(f"the request cannot be sent: {error}", Code.INVALID_ARGUMENT)


#: What codes travel as.
CODE_NUMBERS: Final = {code: number for number, code in enumerate(Code)}
#: The class of an error that has travelled, by the number of its code.
ERRORS: Final = {
    CODE_NUMBERS[kind.code]: kind
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
