"""The answer to an inference whose record a `Recorder` gets: no `Caller` is made for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any

from headrace.engine import Caller, Recorder
from headrace.errors import Code, HeadraceError
from headrace.messages.response import InferResponse
from headrace.off_loop import worded

#: The slots of a class with `Recorded`, which can have none itself beside another base that has some.
RECORDED = ("origin", "outcome", "recorder", "send", "ticket")
#: Ids and trace contexts are cut to this many characters.
LONGEST_TEXT = 256
_CANCELLED = Code.CANCELLED, 0


class Recorded:
    """Adds a record to a `ResponseWriter`, which sends each reply by ``_reply``. ``send`` is what sends it.

    ``origin`` are the fields of a `FinishedInference` that are known from the start, and ``outcome`` are its code and
    the bytes of its response.
    """

    __slots__ = ()
    origin: tuple[Any, ...]
    outcome: tuple[Code | None, int]
    recorder: Recorder
    send: Callable[[Any], None]
    #: Its `Ticket`, until it is answered.
    ticket: Any

    def _reply(self, reply: Any) -> None:
        ticket = self.ticket
        self.ticket = None  # they refer to each other
        if ticket is not None:
            ended = monotonic_ns(), ticket.queued_ns, getattr(ticket, "times", None)
            self.recorder.add(self.origin + (_CANCELLED if ticket.abandoned else self.outcome) + ended)
        self.send(reply)

    def encode(self, response: InferResponse, loop_limit_bytes: int) -> Any:
        size = 0
        for tensor in response.outputs.values():
            size += tensor.nbytes
        self.outcome = None, size  # type: ignore[misc]
        return super().encode(response, loop_limit_bytes)  # type: ignore[misc]

    def refuse(self, error: Exception) -> None:
        """Answer a request that could not be submitted."""
        self.settle(worded(error))  # type: ignore[attr-defined]

    def refused(self, error: HeadraceError) -> Any:
        self.outcome = error.code, 0  # type: ignore[misc]
        return super().refused(error)  # type: ignore[misc]


def principal_of(certificate: Mapping[str, Any]) -> str:
    """Return the `Caller.principal` of a caller with ``certificate``."""
    return Caller("", certificate=certificate).principal
