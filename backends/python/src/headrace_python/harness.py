"""A Python model in this process, without a server: what the fixture ``python_model`` gives.

The instance is the one that a server would have; only who calls it differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import HeadraceError
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer
from headrace.messages.tensor import as_tensor
from headrace.workers.contract import Contract
from headrace_python.instance import PythonInstance
from headrace_python.offline import Arrays, OfflineServices, to_array
from headrace_python.records import Record, RecordedCall
from triton_python_backend_utils import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    InferenceRequest,
    TritonError,
)


@dataclass(frozen=True, slots=True)
class Response:
    """One response: its outputs as arrays (strings as objects of bytes), or an error."""

    outputs: Mapping[str, Any]
    error: TritonError | None = None
    parameters: Mapping[str, str | int | bool | float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """The output ``name``. Raises AssertionError if the model answered with an error."""
        assert self.error is None, f"the model answered with an error: {self.error}"
        return self.outputs[name]


class PythonModel:
    """One instance of a model, initialized. ``config`` is what it was given, completed.

    ``model`` is the object of the model's own class, and ``services`` shows the metrics it has set.
    """

    def __init__(
        self, instance: PythonInstance, config: dict[str, Any], services: OfflineServices, timeout_s: float
    ) -> None:
        self.config = config
        self.services = services
        self.model: Any = instance.model
        self._instance = instance
        self._timeout_s = timeout_s
        self._contract = Contract.from_json(config, "1") if config.get("output") else None
        self._is_open = True

    def infer(self, inputs: Arrays, **options: Any) -> Response:
        """The response to one request; ``options`` are those of `request`.

        Raises TypeError for a decoupled model, and TimeoutError for one that does not answer.
        """
        if self._instance.runtime.decoupled:
            raise TypeError(f"'{self.config['name']}' is decoupled: its responses come from stream()")
        return self.stream(inputs, **options)[0]

    def stream(self, inputs: Arrays, **options: Any) -> list[Response]:
        """All responses to one request, once its last has come."""
        return self.execute([self.request(inputs, **options)])[0]

    def execute(self, requests: Sequence[InferenceRequest | InferRequest]) -> list[list[Response]]:
        """The responses to each of ``requests``, which are executed as one batch."""
        name = str(self.config["name"])
        records = [Record(_sent(each, name) if isinstance(each, InferenceRequest) else each) for each in requests]
        self._instance.accept([RecordedCall(record) for record in records])
        return [
            [self._response(record.request, answer) for answer in record.wait(self._timeout_s)] for record in records
        ]

    def request(
        self,
        inputs: Arrays,
        outputs: Sequence[str] = (),
        parameters: Mapping[str, str | int | bool] | None = None,
        request_id: str = "",
        correlation_id: int | str = 0,
        flags: int = 0,
        timeout_us: int = 0,
    ) -> InferRequest:
        """A request as the server passes it on. Its ``cancelled`` is what the model sees of its caller."""
        return InferRequest(
            str(self.config["name"]),
            {name: as_tensor(value) for name, value in inputs.items()},
            _nobody,
            tuple(outputs),
            request_id,
            parameters=dict(parameters or {}),
            timeout_us=timeout_us,
            sequence_id=correlation_id,
            sequence_start=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            sequence_end=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        )

    def is_ready(self) -> bool:
        """What the model's ``is_ready`` says; True if it has none."""
        return self._instance.is_ready()

    def finalize(self) -> None:
        """Call ``finalize``; once. ``model`` stays, for the test to look at."""
        if self._is_open:
            self._is_open = False
            self._instance.close()

    def _response(self, request: InferRequest, answer: Answer) -> Response:
        if self._contract is not None:
            answer = self._contract.signed(request, answer)
        if isinstance(answer, HeadraceError):
            return Response({}, TritonError._from_headrace(answer))
        if answer is None:
            return Response({})
        return Response({name: to_array(value) for name, value in answer.outputs.items()}, None, answer.parameters)


def _sent(request: InferenceRequest, name: str) -> InferRequest:
    """A request that a test has made, as the server would pass it on."""
    source = request._source
    source.model_name = source.model_name or name
    source.inputs = {tensor.name(): tensor._wire() for tensor in request.inputs()}
    return source


def _nobody(answer: Answer, final: bool) -> None:
    """Answers are given to the call."""
