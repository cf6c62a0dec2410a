"""The forms of an answer that is sent to another process, and the errors sent for answers that cannot be encoded."""

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
    PermissionDenied,
    Rescheduled,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from headrace.messages.response import Answer, InferResponse


class AnswerStatus(IntEnum):
    """The form of an answer."""

    RESPONSE = 0
    ERROR = 1
    NOTHING = 2  # no further response: all have been sent
    LATER = 3  # not an answer: answers follow after the batch
    RESCHEDULED = 4


class Reply(NamedTuple):
    """An answer to the request with the number ``call``. ``answer`` is None for NOTHING and LATER."""

    call: int
    status: AnswerStatus
    final: bool
    answer: InferResponse | HeadraceError | None


#: The four times of one execution, in nanoseconds of the monotonic clock: it began, its inputs were concatenated, the
#: engine returned, its outputs were split into answers.
Times: TypeAlias = tuple[int, int, int, int]


def reply_of(call: int, answer: Answer, final: bool) -> Reply:
    """Return ``answer`` as a reply to ``call``."""
    if isinstance(answer, InferResponse):
        return Reply(call, AnswerStatus.RESPONSE, final, answer)
    if isinstance(answer, Rescheduled):
        return Reply(call, AnswerStatus.RESCHEDULED, final, answer)
    if answer is None:
        return Reply(call, AnswerStatus.NOTHING, final, None)
    return Reply(call, AnswerStatus.ERROR, final, answer)


def unsendable_reply(reply: Reply, error: Exception) -> Reply:
    """Return the error that is sent instead of ``reply``, which could not be encoded."""
    return reply_of(reply.call, HeadraceError(f"the response cannot be sent: {error}", Code.INTERNAL), reply.final)


def unsendable_request(error: Exception) -> HeadraceError:
    """Return the error for a model whose request cannot be encoded: INVALID_ARGUMENT, since the request is at fault."""
    return HeadraceError(f"the request cannot be sent: {error}", Code.INVALID_ARGUMENT)


#: The number that stands for each code in a message.
CODE_NUMBERS: Final = {code: number for number, code in enumerate(Code)}
#: The class of a received error, by the number of its code.
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
        Unauthenticated,
        PermissionDenied,
        ResourceExhausted,
    )
}
