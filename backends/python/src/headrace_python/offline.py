"""The server's services for a model, without a server: for unit tests of models.

Other models are functions, metrics are in memory, and log lines go to `logging`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from headrace import (
    LOG_LEVELS,
    BackendError,
    BytesTensor,
    HeadraceError,
    InferRequest,
    InferResponse,
    LogLevel,
    NotFound,
    Services,
    Ticket,
    Unsupported,
    as_tensor,
)
from headrace_python.outcomes import describe
from triton_python_backend_utils.metrics import MetricsInMemory

log = logging.getLogger("headrace.python")

Arrays: TypeAlias = Mapping[str, Any]
#: A function in place of another model: it takes the inputs, and returns the outputs, or an iterable with the outputs
#: of each response of a decoupled model. An exception is an error of the model.
OtherModel: TypeAlias = Callable[[dict[str, Any]], "Arrays | Iterable[Arrays]"]


class OfflineServices(MetricsInMemory, Services):
    """``models`` are the other models by name."""

    def __init__(self, models: Mapping[str, OtherModel]) -> None:
        super().__init__()
        self.models = models

    def infer(self, ticket: Ticket) -> None:
        request, respond = ticket.request, ticket.respond
        try:
            result = self._answer(request)
        except HeadraceError as error:
            respond(error, True)
        except Exception as error:
            respond(BackendError(describe(error)), True)
        else:
            if request.decoupled:
                for response in result:
                    respond(response, False)
            respond(None if request.decoupled else result[0], True)

    def cancel(self, ticket: Ticket) -> None:
        ticket.cancel()

    def stop(self, ticket: Ticket) -> None:
        ticket.stop()

    def read(self, ticket: Ticket) -> None:
        """Do nothing: all responses have been sent."""

    def load_model(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        raise Unsupported(f"no server to load '{name}': a model under test gets other models as functions")

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        raise Unsupported(f"no server to unload '{name}': a model under test gets other models as functions")

    def is_model_ready(self, name: str, version: str) -> bool:
        return name in self.models

    def log(self, level: LogLevel, message: str, file: str, line: int) -> None:
        log.log(LOG_LEVELS[level], "%s:%d: %s", file, line, message)

    def _answer(self, request: InferRequest) -> list[InferResponse]:
        model = self.models.get(request.model_name)
        if model is None:
            raise NotFound(f"Request for unknown model: '{request.model_name}' is not found")
        result = model({name: to_array(value) for name, value in request.inputs.items()})
        several = [result] if isinstance(result, Mapping) else list(result)
        if len(several) != 1 and not request.decoupled:
            raise Unsupported(f"'{request.model_name}' gave {len(several)} responses to a request that takes one")
        return [InferResponse({name: as_tensor(value) for name, value in each.items()}) for each in several]


def to_array(value: Any) -> Any:
    """Return a tensor as a model gets it: strings as an object array of bytes."""
    return value.to_objects() if isinstance(value, BytesTensor) else value
