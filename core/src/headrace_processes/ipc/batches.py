"""Messages that carry batches to the process of an instance, and their answers back.

If all requests, or answers, of a batch have one known layout, `headrace_processes.ipc.layouts` encodes them. Otherwise
`headrace_processes.ipc.codec` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace_processes.ipc.codec import Decoder, Encoder, ReceivedRequest, read_times
from headrace_processes.ipc.framing import Frame, Kind
from headrace_processes.ipc.layouts import MAX_ALIKE, Layout, LayoutReader, LayoutWriter, is_plain, request_key
from headrace_processes.ipc.replies import AnswerStatus, Reply, Times

# ---------------------------------------------------------------------- the side that sends batches


class Done(NamedTuple):
    """The final answers of a batch that has run. ``calls`` are the numbers of their requests, in the same order."""

    calls: Sequence[int]
    answers: Sequence[Answer]
    times: Times


class BatchWriter:
    """Encodes batches: by layout where possible, else with ``encoder``. One thread at a time."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self._layouts = encoder, LayoutWriter()
        self._known = self._layouts.known

    def requests(self, batch: Sequence[tuple[int, Ticket]]) -> bytes:
        """Return the message of a batch with consecutive calls. Raises `ValueError` if it cannot be encoded."""
        first_call, ticket = batch[0]
        layout = self._layout(ticket)
        requests = [ticket.request]
        if len(batch) > 1:
            if len(batch) > MAX_ALIKE:
                layout = None
            for _, other in batch[1:]:
                if layout is None or self._layout(other) is not layout:
                    layout = None
                    break
                requests.append(other.request)
        return self._encoder.requests(batch) if layout is None else self._layouts.requests(layout, first_call, requests)

    def _layout(self, ticket: Ticket) -> Layout | None:
        request = ticket.request
        if request.decoupled or ticket.pinned or not is_plain(request):
            return None
        tensors_key = request_key(request)
        if tensors_key is None:
            return None
        callers = request.callers
        key = (ticket.rows, tensors_key, callers) if callers else (ticket.rows, tensors_key)
        layout = self._known.get(key)
        if layout is None:
            name, version = (request.model_name, request.model_version) if callers else ("", "")
            layouts = self._layouts
            layout = layouts.layout_for_key(key, name, version, request.outputs, request.inputs, ticket.rows, callers)
        return layout


class DoneReader:
    """Decodes the answers of batches: those without a layout with ``decoder``."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._layouts = decoder, LayoutReader()

    def receive(self, message: Frame, in_flight: Mapping[int, Ticket]) -> Done | None:
        """Decode a DONE or ALIKE_DONE for requests ``in_flight``. A LAYOUT is stored and returns None. Raises
        `ProtocolError`."""
        if message.kind == Kind.ALIKE_DONE:
            _, first_call, times, outputs = self._layouts.done(message)
            calls = range(first_call, first_call + len(outputs))
            return Done(calls, [InferResponse(each, {}, "", "") for each in outputs], times)
        if message.kind == Kind.LAYOUT:
            self._layouts.receive(message)
            return None
        replies = [
            reply for reply in self._decoder.answers(message, in_flight) if reply.status is not AnswerStatus.LATER
        ]
        return Done([reply.call for reply in replies], [reply.answer for reply in replies], read_times(message))


# ---------------------------------------------------------------------- the side that runs batches


class BatchReader:
    """Decodes batches: those without a layout with ``decoder``. A request that names no model gets ``model_name`` and
    ``model_version``."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._layouts = decoder, LayoutReader()
        self.model_name = self.model_version = ""

    def receive(self, message: Frame) -> Sequence[ReceivedRequest]:
        """Decode a REQUESTS or ALIKE_REQUESTS. A LAYOUT is stored and returns no requests. Raises `ProtocolError`."""
        if message.kind == Kind.ALIKE_REQUESTS:
            layout, call, ids, inputs = self._layouts.requests(message)
            outputs, callers, rows = layout.outputs, layout.callers, layout.rows
            name, version = (
                (layout.model_name, layout.model_version) if callers else (self.model_name, self.model_version)
            )
            return [
                ReceivedRequest(
                    name, each, outputs, ids[place] if ids else "", version, {}, 0, 0, 0, False, False, callers, None,
                    False, None, call + place, rows, False,
                )
                for place, each in enumerate(inputs)
            ]  # fmt: skip
        if message.kind == Kind.LAYOUT:
            self._layouts.receive(message)
            return ()
        return self._decoder.requests(message, model_name=self.model_name, model_version=self.model_version)


class DoneWriter:
    """Encodes the answers of batches: by layout where possible, else with ``encoder``. One thread at a time."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self._layouts = encoder, LayoutWriter()

    def answers(self, replies: Sequence[Reply], times: Times) -> bytes:
        """Return the message of the answers to a whole batch. Raises `ValueError` if it cannot be encoded."""
        call, _, _, answer = replies[0]
        layout = self._layouts.layout_of(answer)
        if layout is None or len(replies) > MAX_ALIKE:
            return self._encoder.answers(replies, times)
        outputs = [answer.outputs]  # type: ignore[union-attr]  # it has a layout
        for place in range(1, len(replies)):
            other = replies[place].answer
            if replies[place].call != call + place or self._layouts.layout_of(other) is not layout:
                return self._encoder.answers(replies, times)
            outputs.append(other.outputs)  # type: ignore[union-attr]
        return self._layouts.done(layout, call, times, outputs)
