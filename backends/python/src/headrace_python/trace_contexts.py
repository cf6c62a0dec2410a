"""The trace context of OpenTelemetry, current while a model executes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from triton_python_backend_utils.inference_request import InferenceRequest

T = TypeVar("T")
Run = Callable[["list[InferenceRequest]"], T]


def in_trace_context(run: Run[T]) -> Run[T] | None:
    """Return ``run`` in the context of the first traced request of its batch.

    Return None if the model, which is loaded, has not imported OpenTelemetry.
    """
    if "opentelemetry.trace" not in sys.modules:
        return None
    try:
        context = import_module("opentelemetry.context")
        propagation = import_module("opentelemetry.trace.propagation.tracecontext")
        attach, detach = context.attach, context.detach
        extract = propagation.TraceContextTextMapPropagator().extract
    except (ImportError, AttributeError):  # a module of the model's own has the name
        return None

    def traced(requests: list[InferenceRequest]) -> T:
        headers = _headers(requests)
        if headers is None:
            return run(requests)
        token = attach(extract(headers))
        try:
            return run(requests)
        finally:
            detach(token)

    return traced


def _headers(requests: Sequence[InferenceRequest]) -> dict[str, str] | None:
    for request in requests:
        sender = request._source.sender
        if sender is not None and sender.trace_context:
            return dict(sender.trace_context)
    return None
