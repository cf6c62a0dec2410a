"""Batches on their way to the process of an instance, and what has become of them.

Those whose requests, or answers, are like others before them travel undescribed (`headrace.ipc.layouts`), and all
others as `headrace.ipc.codec` has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.ipc.codec import Decoder, Encoder, ReceivedRequest, read_times
from headrace.ipc.framing import Frame, Kind
from headrace.ipc.layouts import MOST_ALIKE, Layout, LayoutReader, LayoutWriter, is_plain, request_key
from headrace.ipc.replies import AnswerStatus, Reply, Times
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket

# ---------------------------------------------------------------------- the side that has batches run


class Done(NamedTuple):
    """A batch has run: the last answers that it has brought, each with its call."""

    calls: Sequence[int]
    answers: Sequence[Answer]
    times: Times


class BatchWriter:
    """Writes batches, those that it cannot tell by a layout with ``encoder``. One thread at a time."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self._layouts = encoder, LayoutWriter()
        self._known = self._layouts.known

    def requests(self, batch: Sequence[tuple[int, Ticket]]) -> bytes:
        """A message of a batch, whose calls follow one another. Raises `ValueError` for what cannot travel."""
        first_call, ticket = batch[0]
        layout = self._layout(ticket)
        requests = [ticket.request]
        if len(batch) > 1:
            if len(batch) > MOST_ALIKE:
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
        found = request_key(request)
        if found is None:
            return None
        callers = request.callers
        key = (ticket.rows, found, callers) if callers else (ticket.rows, found)
        layout = self._known.get(key)
        if layout is None:
            name, version = (request.model_name, request.model_version) if callers else ("", "")
            layout = self._layouts.meet(key, name, version, request.outputs, request.inputs, ticket.rows, callers)
        return layout


class DoneReader:
    """Reads what has become of batches, with ``decoder`` where no layout tells."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._layouts = decoder, LayoutReader()

    def hear(self, message: Frame) -> Done | None:
        """Take DONE, ALIKE_DONE or LAYOUT, which brings nothing. Raises `ProtocolError`."""
        if message.kind == Kind.ALIKE_DONE:
            _, first_call, times, outputs = self._layouts.done(message)
            calls = range(first_call, first_call + len(outputs))
            return Done(calls, [InferResponse(each, {}, "", "") for each in outputs], times)
        if message.kind == Kind.LAYOUT:
            self._layouts.hear(message)
            return None
        replies = [reply for reply in self._decoder.answers(message) if reply.status is not AnswerStatus.LATER]
        return Done([reply.call for reply in replies], [reply.answer for reply in replies], read_times(message))


# ---------------------------------------------------------------------- the side that runs them


class BatchReader:
    """Reads batches, with ``decoder`` where no layout tells. What does not say which model it asks is for that of
    ``model_name`` and ``model_version``."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._layouts = decoder, LayoutReader()
        self.model_name = self.model_version = ""

    def hear(self, message: Frame) -> Sequence[ReceivedRequest]:
        """Take REQUESTS, ALIKE_REQUESTS or LAYOUT, which brings none. Raises `ProtocolError`."""
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
            self._layouts.hear(message)
            return ()
        return self._decoder.requests(message, model_name=self.model_name, model_version=self.model_version)


class DoneWriter:
    """Writes what has become of batches, with ``encoder`` where no layout tells. One thread at a time."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder, self._layouts = encoder, LayoutWriter()

    def answers(self, replies: Sequence[Reply], times: Times) -> bytes:
        """A message of the answers to a whole batch. Raises `ValueError` for what cannot travel."""
        call, _, _, answer = replies[0]
        layout = self._layouts.layout_of(answer)
        if layout is None or len(replies) > MOST_ALIKE:
            return self._encoder.answers(replies, times)
        outputs = [answer.outputs]  # type: ignore[union-attr]  # it has a layout
        for place in range(1, len(replies)):
            other = replies[place].answer
            if replies[place].call != call + place or self._layouts.layout_of(other) is not layout:
                return self._encoder.answers(replies, times)
            outputs.append(other.outputs)  # type: ignore[union-attr]
        return self._layouts.done(layout, call, times, outputs)
