"""How one instance is driven: what the three rungs of `penstock.backends.base` have in common."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from penstock.errors import BackendError, PenstockError
from penstock.messages.request import InferRequest
from penstock.messages.response import Answer, InferResponse
from penstock.messages.tensor import Tensor, as_tensor, data_type
from penstock.telemetry.statistics import BatchTimes
from penstock.workers.contract import Contract

log = logging.getLogger(__name__)

#: Sends a response that is not the last of its request; callable on the instance's thread.
Progress: TypeAlias = Callable[[InferRequest, InferResponse], None]


class Runner(ABC):
    """Drives one instance. ``contract`` is what its model promises to clients."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract

    def connect(self, progress: Progress) -> None:
        """Where responses go that are not the last of their request; called before `run`."""

    @abstractmethod
    def run(self, batch: Sequence[InferRequest]) -> tuple[Sequence[Answer], BatchTimes]:
        """One final answer per request, in order. Never raises because of the instance."""

    def respond(self, request: InferRequest, outputs: Mapping[str, Tensor]) -> InferResponse:
        """An answer of this model to ``request``."""
        return InferResponse(outputs, {}, self.contract.name, self.contract.version, request.id)

    def sign(self, request: InferRequest, answer: InferResponse) -> InferResponse:
        """``answer`` as this model's, with the outputs requested; raises `BackendError`."""
        outputs: dict[str, Tensor] = {}
        for name, value in answer.outputs.items():
            tensor, spec = as_tensor(value), self.contract.outputs.get(name)
            if spec is None or data_type(tensor) is not spec.datatype:
                raise BackendError(f"model '{self.contract.name}': output '{name}' is not what the config declares")
            if not request.outputs or name in request.outputs:
                outputs[name] = tensor
        return InferResponse(outputs, answer.parameters, self.contract.name, self.contract.version, request.id)


def as_error(error: Exception, contract: Contract) -> PenstockError:
    """``error`` as the caller will see it; an unexpected one is logged with its traceback."""
    if isinstance(error, PenstockError):
        return error
    log.error("model '%s' version %s failed to execute", contract.name, contract.version, exc_info=error)
    failure = BackendError(f"model '{contract.name}' failed to execute: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
