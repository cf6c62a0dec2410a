"""Loads a Python model in this process, without a server: the result of the fixture ``python_model``.

The instance is the same as in a server; only its caller differs.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace import (
    Answer,
    BackendError,
    Call,
    Cancelled,
    HeadraceError,
    InferRequest,
    LoadError,
    OutputSchema,
    Rescheduled,
    Ticket,
    as_tensor,
)
from headrace_python.instance import InstanceDescription, PythonInstance, instance_of, is_decoupled
from headrace_python.module import IsolatedModules, model_file
from headrace_python.offline import Arrays, OfflineServices, to_array
from triton_python_backend_utils import (
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    InferenceRequest,
    ModelConfig,
    TritonError,
)
from triton_python_backend_utils.runtime import ModelPhase, Runtime


class Record:
    """The answers to one request."""

    def __init__(self, request: InferRequest) -> None:
        self.request = request
        self.answers: list[Answer] = []
        self.last: Answer = None
        self.ended = threading.Event()

    def add(self, answer: Answer, final: bool) -> None:
        self.last = answer
        if answer is not None:
            self.answers.append(answer)
        if final:
            self.ended.set()

    def wait(self, timeout_s: float) -> list[Answer]:
        if not self.ended.wait(timeout_s):
            raise TimeoutError(f"the model gave no last answer within {timeout_s} s")
        return self.answers

    def repeats(self, timeout_s: float) -> bool:
        """True if the model rescheduled the request. Waits for its answer.

        ``request`` is then the one that a scheduler would pass on.
        """
        self.wait(timeout_s)
        if not isinstance(self.last, Rescheduled):
            return False
        self.answers.pop()
        request = self.request
        if request.cancelled:
            self.answers.append(Cancelled(f"{request.log_id}request was cancelled"))
            return False
        self.request = request.with_sequence(request.sequence_id, False, False)
        self.ended.clear()
        return True


class RecordedCall(Call):
    """Writes answers to its record, or an error if it is dropped without a last answer."""

    def __init__(self, record: Record) -> None:
        self.request = record.request
        self._record = record

    def send(self, answer: Answer, final: bool = True) -> None:
        self._record.add(answer, final)

    def __del__(self) -> None:
        if not self._record.ended.is_set():
            self._record.add(BackendError("the model gave no last answer"), True)


@dataclass(frozen=True, slots=True)
class Response:
    """One response: its outputs as arrays (strings as objects of bytes), or an error."""

    outputs: Mapping[str, Any]
    error: TritonError | None = None
    parameters: Mapping[str, str | int | bool | float] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return the output ``name``. Raises AssertionError if the model answered with an error."""
        assert self.error is None, f"the model answered with an error: {self.error}"
        return self.outputs[name]


class PythonModel:
    """One instance of a model, initialized. ``config`` is its completed config.

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
        self._iterates = bool(config.get("sequence_batching", {}).get("iterative_sequence"))
        self._schema = OutputSchema.from_json(config, "1") if config.get("output") else None
        self._is_open = True
        #: The records of the last executed requests, by the requests as first sent.
        self._records: dict[InferRequest, Record] = {}

    def infer(self, inputs: Arrays, **options: Any) -> Response:
        """Return the response to one request; ``options`` are those of `request`.

        Raises TypeError for a decoupled model, and TimeoutError for one that does not answer.
        """
        if self._instance.runtime.decoupled:
            raise TypeError(f"'{self.config['name']}' is decoupled: its responses come from stream()")
        return self.stream(inputs, **options)[0]

    def stream(self, inputs: Arrays, **options: Any) -> list[Response]:
        """Return all responses to one request, after the last one."""
        return self.execute([self.request(inputs, **options)])[0]

    def execute(self, requests: Sequence[InferenceRequest | InferRequest]) -> list[list[Response]]:
        """Return the responses to each of ``requests``, which are executed as one batch.

        Requests that an iterative model reschedules are executed again, together. Each request is a sequence: if the
        model reads the ``correlation_id``, set it by `request`, with flag START.
        """
        name = str(self.config["name"])
        records = [Record(_sent(each, name) if isinstance(each, InferenceRequest) else each) for each in requests]
        self._records = dict(zip([record.request for record in records], records, strict=True))
        waiting = records
        while waiting:
            self._answer([RecordedCall(record) for record in waiting])
            waiting = [record for record in waiting if record.repeats(self._timeout_s)] if self._iterates else []
        return [
            [self._response(record.request, answer) for answer in record.wait(self._timeout_s)] for record in records
        ]

    def _answer(self, calls: Sequence[RecordedCall]) -> None:
        """Execute ``calls`` on the instance, and record its answers."""
        returned = self._instance.accept(calls)
        for call, answer in zip(calls, returned or (), strict=False):
            if answer is not None:
                call.send(answer)

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
        """Return a request as the server passes it to a model. `cancel` simulates a disconnect of its client."""
        return InferRequest(
            str(self.config["name"]),
            {name: as_tensor(value) for name, value in inputs.items()},
            tuple(outputs),
            request_id,
            parameters=dict(parameters or {}),
            timeout_us=timeout_us,
            sequence_id=correlation_id,
            sequence_start=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_START),
            sequence_end=bool(flags & TRITONSERVER_REQUEST_FLAG_SEQUENCE_END),
        )

    def cancel(self, request: InferRequest) -> None:
        """Cancel ``request`` for the model, before or during its execution."""
        record = self._records.get(request)
        ticket = Ticket(request if record is None else record.request, _nobody)
        ticket.begin()
        ticket.cancel()
        ticket.end()

    def is_ready(self) -> bool:
        """Return the result of the model's ``is_ready``; True if it has none."""
        return self._instance.is_ready()

    def finalize(self) -> None:
        """Call ``finalize``, once. ``model`` remains, so that the test can read it."""
        if self._is_open:
            self._is_open = False
            self._instance.close()

    def _response(self, request: InferRequest, answer: Answer) -> Response:
        if self._schema is not None:
            complete = request if request.outputs else request.with_outputs(tuple(self._schema.outputs))
            answer = self._schema.signed(complete, answer)
        if isinstance(answer, HeadraceError):
            return Response({}, TritonError._from_headrace(answer))
        if answer is None:
            return Response({})
        return Response({name: to_array(value) for name, value in answer.outputs.items()}, None, answer.parameters)


def _sent(request: InferenceRequest, name: str) -> InferRequest:
    """Return ``request``, which a test made, as the server passes it to a model."""
    source = request._source
    inputs = {tensor.name(): tensor._wire() for tensor in request.inputs()}
    return replace(source, model_name=source.model_name or name, inputs=inputs)


def _nobody(answer: Answer, final: bool) -> None:
    """Do nothing: the `RecordedCall` gets the answers."""


def open_model(
    source: Path | type[Any],
    config: Mapping[str, Any] | None = None,
    parameters: Mapping[str, str] | None = None,
    models: Mapping[str, Callable[..., Any]] | None = None,
    auto_complete: bool = True,
    timeout_s: float = 10.0,
) -> PythonModel:
    """Return the model of ``source``: a ``model.py``, a directory with one, or a class. See `python_model`."""
    services = OfflineServices(models or {})
    file, folder, version = _located(source)
    whole = _config(folder, source.__name__ if isinstance(source, type) else "", config or {}, parameters or {})
    path = file.parent if file is not None else Path(folder, "1")
    runtime = Runtime(whole["name"], str(version), False, services, ModelPhase.COMPLETING, str(path))
    modules = IsolatedModules(file, runtime) if file is not None else None
    release = modules.close if modules is not None else _nothing
    with runtime.entered():
        model_class = modules.load_class(version) if modules is not None else source
        assert isinstance(model_class, type)
        if auto_complete and hasattr(model_class, "auto_complete_config"):
            whole = model_class.auto_complete_config(ModelConfig(json.dumps(whole))).as_dict()
    runtime.phase, runtime.decoupled = ModelPhase.INITIALIZING, is_decoupled(whole)
    description = InstanceDescription(
        whole["name"], version, path, file or path, json.dumps(whole), f"{whole['name']}_0_0", services=services
    )
    return PythonModel(instance_of(model_class, description, runtime, release), whole, services, timeout_s)


def _located(source: Path | type[Any]) -> tuple[Path | None, Path, int]:
    """Return ``model.py`` of ``source``, the model's directory, and the version."""
    if isinstance(source, type):
        module = sys.modules.get(source.__module__)
        return None, Path(getattr(module, "__file__", None) or ".").parent, 1
    if source.is_file():
        return source, source.parent.parent, int(source.parent.name) if source.parent.name.isdecimal() else 1
    if source.name.isdecimal():
        return model_file(source, "{}"), source.parent, int(source.name)
    versions = [int(path.name) for path in source.iterdir() if path.name.isdecimal()]
    if not versions:
        raise LoadError(f"no version directory in '{source}'")
    config = json.dumps(_read(source))
    return model_file(source / str(max(versions)), config), source, max(versions)


def _config(folder: Path, name: str, overrides: Mapping[str, Any], parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the config file of ``folder``, if there is one, overridden by ``overrides``."""
    config: dict[str, Any] = {"backend": "python", "max_batch_size": 0, "input": [], "output": []}
    config |= {} if name else _read(folder)
    config |= overrides
    config["name"] = config.get("name") or name or folder.name
    own = {key: {"string_value": value} for key, value in parameters.items()}
    config["parameters"] = {**config.get("parameters", {}), **own}
    return config


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "config.pbtxt"
    if not file.is_file():
        return {}
    from headrace import config_to_json, read_config

    return config_to_json(read_config(file))


def _nothing() -> None:
    """Release nothing: a class under test keeps its module."""
