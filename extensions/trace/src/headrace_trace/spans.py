"""The spans of OpenTelemetry for one traced request, with the names, events and attributes of a real Triton's.

Besides Triton's spans (``InferRequest``, one with the name of each model, ``compute``), these are added: ``queue``,
``cache`` for a response from the cache, and ``batch``, with links to its requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.span import TraceState
from opentelemetry.trace.status import Status, StatusCode

from headrace_trace.recording import RequestTrace, TracedCall
from headrace_trace.trace_context import CallContext, new_id

_SCOPE = InstrumentationScope("headrace-trace")
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
_OF_MODEL = ("REQUEST_START", "QUEUE_START", "FIRST_RESPONSE", "REQUEST_END")


class SpanMaker:
    """Makes spans of ``resource``."""

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._resource = Resource.create({"service.name": "triton-inference-server", **resource})
        #: From the monotonic clock to the time of day, when the server started.
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def spans(self, trace: RequestTrace) -> Iterator[ReadableSpan]:
        """Yield the spans of a request."""
        for call in trace.calls:
            yield from self._of_call(call)

    def _of_call(self, call: TracedCall) -> Iterator[ReadableSpan]:
        context: CallContext = call.context
        times = dict(call.events)
        parent = context.parent
        failed = Status(StatusCode.ERROR, call.error) if call.error else Status()
        if context.outer:
            around = [event for event in call.events if event[0] not in (*_COMPUTE, *_OF_MODEL)] or call.events
            if around:
                kind = SpanKind.SERVER
                yield self._span("InferRequest", context, context.outer, parent, around, status=failed, kind=kind)
            parent = context.outer
        if "REQUEST_START" not in times:
            return  # it was refused before it reached a model
        attributes = {
            "triton.model_name": call.model,
            "triton.model_version": str(call.version),
            "triton.trace_id": str(call.id),
            "triton.trace_parent_id": str(call.parent.id if call.parent is not None else 0),
        }
        if call.request_id:
            attributes["triton.request_id"] = call.request_id
        attributes |= {name.replace("_", ".", 1): str(value) for name, value in call.parameters.items()}
        if call.text is not None:
            attributes |= call.text.attributes()
        events = [event for event in call.events if event[0] in _OF_MODEL]
        yield self._span(call.model, context, context.model, parent, events, attributes, failed, SpanKind.SERVER)
        waited_until = times.get("COMPUTE_START", times.get("REQUEST_END", 0) if call.is_cached else 0)
        if waited_until:
            name = "cache" if call.is_cached else "queue"
            yield self._span(name, context, new_id(), context.model, [("", times["QUEUE_START"]), ("", waited_until)])
        if call.batch is not None:
            events = [event for event in call.events if event[0] in _COMPUTE]
            yield self._span("compute", context, new_id(), context.model, events)
            if call.batch.requests > 1 and call.batch.calls[0] is call:
                yield self._of_batch(call)

    def _of_batch(self, call: TracedCall) -> ReadableSpan:
        """Return the span of the batch in which ``call`` is the first traced request."""
        batch = call.batch
        assert batch is not None
        links = [Link(_span_context(each.context, each.context.model)) for each in batch.calls]
        attributes = {"headrace.batch.requests": str(batch.requests)}
        events = [("", batch.times.start_ns), ("", batch.times.end_ns)]
        return self._span("batch", call.context, new_id(), call.context.model, events, attributes, links=links)

    def _span(
        self,
        name: str,
        context: CallContext,
        own: int,
        parent: int,
        events: list[tuple[str, int]],
        attributes: Mapping[str, str] | None = None,
        status: Status | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        links: list[Link] | None = None,
    ) -> ReadableSpan:
        """Return a span from the first of ``events`` to the last. Those without a name are not shown."""
        times = [at_ns + self._offset_ns for _, at_ns in events]
        shown = [Event(name, timestamp=at_ns) for (name, _), at_ns in zip(events, times, strict=True) if name]
        return ReadableSpan(
            name,
            _span_context(context, own),
            _span_context(context, parent) if parent else None,
            self._resource,
            attributes or {},
            sorted(shown, key=lambda event: event.timestamp),
            links or (),
            kind,
            status=status or Status(),
            start_time=min(times),
            end_time=max(times),
            instrumentation_scope=_SCOPE,
        )


def _span_context(context: CallContext, span: int) -> SpanContext:
    state = TraceState.from_header([context.tracestate]) if context.tracestate else None
    return SpanContext(context.trace_id, span, is_remote=False, trace_flags=TraceFlags(1), trace_state=state)
