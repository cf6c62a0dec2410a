"""The audit log: changes with their callers, and refused callers.

::

    AuditLog.admit        a control operation: an `AuditedOperation` watches it
    AuditedOperation      its requested change and its outcome
    AuditLog.refused      an interceptor has refused any operation, such as an inference
    AuditLogFile          models that were loaded and unloaded, also by poll or at start
    EventHandler          records of the logger ``headrace.audit``, for example of a changed key file
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from headrace import (
    AnyOperation,
    Caller,
    Engine,
    Extension,
    HeadraceError,
    Interceptor,
    Operation,
    Outcome,
    PublishedMetric,
    ServedModel,
    ServerOptions,
    Watch,
    hookimpl,
)
from headrace_logging.audit_options import AuditLogOptions
from headrace_logging.audit_trail import AuditTrail

WRITTEN, DROPPED, LEFT_OUT = (f"headrace_audit_log_{each}_total" for each in ("written", "dropped", "left_out"))
#: Records of this logger, and of loggers below it, are in the audit log.
LOGGER = logging.getLogger("headrace.audit")

#: The categories of operations that change nothing.
_READING = frozenset(("inference", "health", "metadata", "model-config", "statistics", ""))
#: Operations of other categories that change nothing, or record a change themselves.
_PERHAPS = frozenset(
    (Operation.INDEX, Operation.SHARED_MEMORY_STATUS, Operation.LOG_SETTINGS, Operation.TRACE_SETTINGS)
)
_LOADS = (Operation.LOAD, Operation.UNLOAD)


class AuditLog(Interceptor):
    """Writes a line for each operation that changes something, and for each refusal."""

    name: ClassVar[str] = "audit-log"
    first: ClassVar[bool] = True

    def __init__(self, options: ServerOptions) -> None:
        super().__init__(options)
        self._options = options.group(AuditLogOptions)
        self._running: dict[Caller, AuditedOperation] = {}
        #: It handles no inferences, so core need not call it for them.
        self.spared = sys.maxsize
        if self.enabled:
            self._trail = self._options.trail

    @property
    def enabled(self) -> bool:
        return bool(self._options.file)

    def samples(self, operation: AnyOperation, model: Callable[[], str], traceparent: str) -> bool:
        return operation.category not in _READING

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> Watch | None:
        if operation.category in _READING:
            return None
        record = self._running[caller] = AuditedOperation(caller, self._trail, self._running)
        if model and operation in _LOADS:
            self._trail.busy.add(model)
        return record

    def refused(self, caller: Caller, error: HeadraceError) -> None:
        record = self._running.pop(caller, None)
        if caller.parent is not None and _is_list(caller.parent):
            return  # a list omits models that the caller may not see, which is no refusal
        self._trail.refused(caller, error, {} if record is None else record.details)


def _is_list(caller: Caller) -> bool:
    """True if the operation authorizes each model separately, such as ``GET /v1/models``."""
    operation = caller.operation
    return getattr(operation, "has_parts", False) and operation is not None and operation.category == "metadata"


class AuditedOperation(Watch):
    """A control operation that is not over."""

    __slots__ = ("_caller", "_running", "_trail", "details")

    def __init__(self, caller: Caller, trail: AuditTrail, running: dict[Caller, AuditedOperation]) -> None:
        self._caller, self._trail, self._running = caller, trail, running
        self.details: dict[str, Any] = {}

    def noted(self, details: Mapping[str, Any]) -> None:
        self.details.update(details)

    def ended(self, outcome: Outcome) -> None:
        caller = self._caller
        self._trail.busy.discard(caller.model)
        was_refused = self._running.pop(caller, None) is None
        if not was_refused and (self.details or caller.operation not in _PERHAPS):
            self._trail.ended(caller, outcome.error, self.details)


class EventHandler(logging.Handler):
    """Writes the records of `LOGGER` to the audit log."""

    def __init__(self, trail: AuditTrail) -> None:
        super().__init__(logging.INFO)
        self._trail = trail

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._trail.event("log", level=record.levelname, logger=record.name, message=record.getMessage())
        except Exception:
            self.handleError(record)


class AuditLogFile(Extension):
    """Records actions of the server itself, counts the lines, and closes the file when the server has stopped."""

    name: ClassVar[str] = "audit-log"
    metrics: ClassVar[Sequence[PublishedMetric]] = (
        PublishedMetric(WRITTEN, "Lines of the audit log that were written.", "counter"),
        PublishedMetric(DROPPED, "Lines of the audit log that were dropped, because its file took none.", "counter"),
        PublishedMetric(LEFT_OUT, "Lines of the audit log that were left out, because there were too many.", "counter"),
    )

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._options = engine.options.group(AuditLogOptions)

    @property
    def enabled(self) -> bool:
        return bool(self._options.file)

    @cached_property
    def _handler(self) -> EventHandler:
        return EventHandler(self._options.trail)

    @hookimpl
    def server_started(self) -> None:
        self._record_server_event("server_started")
        LOGGER.addHandler(self._handler)

    @hookimpl
    def server_stopping(self) -> None:
        self._record_server_event("server_stopping")
        LOGGER.removeHandler(self._handler)

    @hookimpl
    def model_loaded(self, model: ServedModel) -> None:
        self._record_model_event("model_loaded", model)

    @hookimpl
    def model_unloaded(self, model: ServedModel) -> None:
        self._record_model_event("model_unloaded", model)

    def measure(self) -> Mapping[str, float]:
        trail = self._options.trail
        return {WRITTEN: trail.file.written, DROPPED: trail.file.dropped, LEFT_OUT: trail.left_out}

    def close(self) -> None:
        self._options.trail.close()

    def _record_server_event(self, what: str) -> None:
        self._options.trail.event(what, pid=os.getpid(), uid=os.getuid(), id=self.engine.options.id)

    def _record_model_event(self, what: str, model: ServedModel) -> None:
        """Record a load or an unload of ``model``, unless it is part of an operation that has its own line."""
        trail = self._options.trail
        if model.name not in trail.busy:
            trail.event(what, model.name, version=model.version)
