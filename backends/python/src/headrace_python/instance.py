"""One instance of a Python model: its life cycle, and the execution of each batch.

Source: docs/spec/behaviours.md sections 9.1, 9.3, 9.4 and 9.7. Every request is answered exactly once: the results of a
whole batch are checked before any is sent, and ``_finish`` of a request does nothing if the model has answered it
through its sender.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import (
    Answer,
    BackendError,
    Call,
    DeferredInstance,
    DeviceKind,
    LoadError,
    Rescheduled,
    Services,
    rate_limited_logger,
)
from headrace_python.coroutines import Coroutines
from headrace_python.outcomes import BadResults, check_results, describe
from headrace_python.trace_contexts import in_trace_context
from triton_python_backend_utils import InferenceRequest, InferenceResponse
from triton_python_backend_utils.runtime import ModelPhase, Runtime

log = logging.getLogger("headrace.python")
#: Limits the lines about failures of a model. Lines that the model itself writes are not limited.
failures = rate_limited_logger("headrace.python.failures")


@dataclass(frozen=True, slots=True)
class InstanceDescription:
    """One instance of a Python model.

    - ``path``: the version's directory.
    - ``file``: its ``model.py``, which several models of a backend may have in common.
    - ``config``: the model's config as JSON, as from the ``/config`` endpoint.
    - ``folders``: the directories for its imports; if empty, that of ``file`` and its parent.
    """

    name: str
    version: int
    path: Path
    file: Path
    config: str
    instance_name: str
    device_kind: DeviceKind = "cpu"
    device_id: int = 0
    services: Services | None = None
    folders: Sequence[Path] = ()

    def args(self) -> dict[str, str]:
        """Return the argument of ``initialize`` (docs/spec/behaviours.md section 9.1)."""
        return {
            "model_config": self.config,
            "model_instance_kind": self.device_kind.upper(),
            "model_instance_name": self.instance_name,
            "model_instance_device_id": str(self.device_id),
            "model_repository": str(self.path.parent),
            "model_version": str(self.version),
            "model_name": self.name,
        }


def is_decoupled(config: dict[str, Any]) -> bool:
    """True if the model answers through response senders only."""
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))


class PythonInstance(DeferredInstance):
    """``model_class``, made and initialized. ``release`` is called when the model is no longer needed.

    Raises `LoadError` with the model's traceback.
    """

    def __init__(
        self, model_class: type[Any], description: InstanceDescription, runtime: Runtime, release: Callable[[], None]
    ) -> None:
        self.name = description.instance_name
        self.runtime = runtime
        self.coroutines = Coroutines(self.name)
        self._release = release
        self._home = str(description.file.parent.parent)
        self._outputs = tuple(output["name"] for output in json.loads(description.config).get("output", ()))
        try:
            self.model = self._initialized(model_class, description.args())
        except BaseException as error:  # the model's: SystemExit is its error, too
            release()
            raise LoadError(describe(error, self._home)) from error
        self._execute: Callable[[list[InferenceRequest]], object] = getattr(self.model, "execute", self._no_execute)
        runtime.phase = ModelPhase.SERVING

    def accept(self, calls: Sequence[Call]) -> Sequence[Answer] | None:
        """Execute the batch."""
        requests = [self._received(call) for call in calls]
        with self.runtime.entered(_callers(calls), calls[0].request):
            return self.run(requests)

    def close(self) -> None:
        """Call ``finalize``, log its errors, and release the model."""
        self.runtime.phase = ModelPhase.FINALIZING
        try:
            with self.runtime.entered():
                if hasattr(self.model, "finalize"):
                    self.model.finalize()
        except BaseException as error:  # there is no caller
            log.error("finalize of '%s' failed: %s", self.name, describe(error))
        finally:
            self.coroutines.close()
            del self.model, self._execute
            self._release()

    def _initialized(self, model_class: type[Any], args: dict[str, str]) -> Any:
        with self.runtime.entered():
            model = model_class()
            if hasattr(model, "initialize"):
                model.initialize(args)
        return model

    def _no_execute(self, requests: list[InferenceRequest]) -> None:
        raise BadResults(f"Python model {self.name} does not implement `execute` method.")

    def _received(self, call: Call) -> InferenceRequest:
        # As in Triton, a request without output names requests all outputs of the config.
        return InferenceRequest._received(call, self.runtime, self._outputs)

    def run(self, requests: list[InferenceRequest], /) -> Sequence[Answer] | None:
        """Execute ``requests``. Return the answers that were not sent yet. Raises no exception of the model."""
        try:
            returned = self._execute([*requests])  # the model may change its list
            if not isinstance(returned, list) and isinstance(returned, Coroutine):
                if self.runtime.decoupled:
                    self.coroutines.start(self._finish_async(requests, returned))
                    return None
                returned = self.coroutines.run(returned)
            if not self.runtime.decoupled:
                return [self._answer(*pair) for pair in zip(requests, check_results(requests, returned), strict=True)]
            self._check_decoupled(requests, returned)
        except BaseException as error:  # the model's: SystemExit is its error, too
            self._fail(requests, error)
        return None

    async def _finish_async(self, requests: list[InferenceRequest], returned: Awaitable[object]) -> None:
        """Await the result of a decoupled model's coroutine, while the next batches begin."""
        try:
            self._check_decoupled(requests, await returned)
        except BaseException as error:  # of the model, or from `close`
            self._fail(requests, error)

    def _check_decoupled(self, requests: list[InferenceRequest], returned: object) -> None:
        """Reschedule the requests for which a decoupled model set the flag. Raises `BadResults`."""
        if returned is not None:
            raise BadResults(
                f"Python model '{self.name}' is using the decoupled mode and the execute function must return None."
            )
        for request in requests:
            if request._rescheduled:
                request._finish(Rescheduled())

    def _answer(self, request: InferenceRequest, response: InferenceResponse | None) -> Answer:
        """Return the answer to ``request``; None if its sender answers."""
        answer: Answer
        if response is not None:
            try:
                answer = response._message()
            except Exception as error:  # an output that cannot be sent fails only its own request
                answer = self._failure(error)
        elif request._rescheduled:
            answer = Rescheduled()
        else:
            return None
        if request._close():
            return answer
        if not request._finish(answer):
            failures.warning("'%s' returned a response to a request that its response sender has answered", self.name)
        return None

    def _fail(self, requests: Sequence[InferenceRequest], error: BaseException) -> None:
        failure = self._failure(error)
        for request in requests:
            request._finish(failure)

    def _failure(self, error: BaseException) -> BackendError:
        if isinstance(error, BadResults):
            text = whole = str(error)
        else:  # an exception of the model
            text, whole = describe(error, self._home), describe(error)
        failures.error("'%s' failed: %s", self.name, whole)
        return BackendError(f"Failed to process the request(s) for model '{self.name}', message: {text}")


class CheckedInstance(PythonInstance):
    """An instance whose model has an ``is_ready``, sync or async."""

    def is_ready(self) -> bool:
        """Return the model's answer. Raises `BackendError` if that is not a bool, or with the model's traceback."""
        try:
            with self.runtime.entered():
                ready = self.model.is_ready()
                if isinstance(ready, Coroutine):
                    ready = self.coroutines.run(ready)
        except BaseException as error:  # the model's
            raise BackendError(describe(error, self._home)) from error
        if not isinstance(ready, bool):
            raise BackendError("is_ready() must return a boolean value")
        return ready


def instance_of(
    model_class: type[Any], description: InstanceDescription, runtime: Runtime, release: Callable[[], None]
) -> PythonInstance:
    """Return an instance; it has an ``is_ready`` for core only if the model has one."""
    kind = CheckedInstance if hasattr(model_class, "is_ready") else PythonInstance
    instance = kind(model_class, description, runtime, release)
    traced = in_trace_context(instance.run)
    if traced is not None:
        instance.run = traced  # type: ignore[method-assign]
    return instance


def _callers(calls: Sequence[Call]) -> tuple[str, ...]:
    """Return the models that wait for any of ``calls``, each once."""
    names: list[str] = []
    for call in calls:
        if call.request.callers:
            names += call.request.callers
    return tuple(dict.fromkeys(names)) if names else ()
