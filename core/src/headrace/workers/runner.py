"""How one instance is driven: what the four rungs of `headrace.backends.base` have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, Protocol, TypeAlias

from headrace.errors import BackendError, HeadraceError, summary
from headrace.messages.request import InferRequest, Parameter
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import Tensor
from headrace.messages.ticket import Ticket
from headrace.telemetry.pacing import paced
from headrace.telemetry.statistics import BatchTimes
from headrace.workers.output_schema import OutputSchema

log = paced(__name__)


class Later(Enum):
    """The type of `LATER`."""

    LATER = "later"


#: Stands for the last answer of a request that goes through the `AnswerSink`.
LATER: Final = Later.LATER

Given: TypeAlias = "Answer | Later"


class AnswerSink(Protocol):
    """Where answers go that `Runner.run` does not return."""

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        """Pass on ``answer``; ``final`` exactly once per request, last. Never blocks, never raises.

        Any thread. A finalizer may call it in the middle of another call of the same thread, so
        that no plain lock may be held in it.
        """


class Runner(ABC):
    """Drives one instance. ``schema`` is what its model promises to clients.

    All methods run on the instance's thread.
    """

    def __init__(self, schema: OutputSchema) -> None:
        self.schema = schema
        self.parameters: Mapping[str, Parameter] = MappingProxyType({})
        self.sink: AnswerSink

    def connect(self, sink: AnswerSink) -> None:
        """Everything that `run` does not return goes to ``sink``. Called before `run`."""
        self.sink = sink

    @abstractmethod
    def run(self, batch: Sequence[Ticket]) -> tuple[Sequence[Given], BatchTimes]:
        """Per request, in order, its last answer or `LATER`. Never raises because of the instance."""

    def close(self) -> None:
        """End what is still open with `Unavailable`. Called before the instance is closed."""

    def respond(self, request: InferRequest, outputs: Mapping[str, Tensor]) -> InferResponse:
        """An answer of this model to ``request``."""
        return InferResponse(outputs, self.parameters, self.schema.name, self.schema.version, request.id)


def as_error(error: BaseException, schema: OutputSchema) -> HeadraceError:
    """``error`` as the caller will see it; an unexpected one is logged with its traceback.

    Whatever an instance raises is an error of that execution: also `SystemExit`, a `KeyboardInterrupt` that
    nobody has pressed a key for, and the `CancelledError` of a task that it has awaited. None may end the
    thread that all later requests need.
    """
    if isinstance(error, HeadraceError):
        return error
    context = {"model": schema.name, "version": schema.version}
    log.error("model '%s' version %s failed to execute", schema.name, schema.version, exc_info=error, extra=context)
    failure = BackendError(f"model '{schema.name}' failed to execute: {summary(error)}")
    failure.__cause__ = error
    return failure
