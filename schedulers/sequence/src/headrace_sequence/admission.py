"""The check of requests that begin a sequence, with Triton's errors in Triton's order."""

from __future__ import annotations

from collections.abc import Mapping

from headrace import InferRequest, InvalidArgument, Ticket, Unsupported
from headrace_sequence.added_inputs import AddedInputs
from headrace_sequence.live import LiveSequence

#: The maximum of an id that is a string.
MAX_ID_BYTES = 128


class Admission:
    """The rules of ``model``, whose control inputs are ``inputs``."""

    def __init__(self, model: str, inputs: AddedInputs) -> None:
        self._model, self._inputs = model, inputs

    def check(self, ticket: Ticket) -> None:
        """Raise `InvalidArgument` or `Unsupported` if the request of ``ticket`` cannot begin a sequence."""
        request, key = ticket.request, ticket.request.sequence_id
        if isinstance(key, str) and len(key.encode(errors="replace")) > MAX_ID_BYTES:
            raise Unsupported(f"string correlation ID cannot be longer than {MAX_ID_BYTES} characters")
        to = f"to model '{self._model}' must specify"
        if ticket.rows != 1:
            raise InvalidArgument(f"inference request {to} batch-size 1 due to requirements of sequence batcher")
        if not key:
            raise InvalidArgument(f"inference request {to} a non-zero or non-empty correlation ID")
        if not request.sequence_start:
            raise self._not_started(request)
        self._inputs.check(request)

    def named(self, request: InferRequest, live: Mapping[int | str, LiveSequence]) -> InferRequest:
        """Return ``request`` of an iterative model with a sequence id: its own, or a random one that is not ``live``.

        Raises `InvalidArgument` if the request does not start its sequence, or has an id that the server generated.
        """
        if not request.sequence_id:
            new_id = self._inputs.make_id()
            while new_id in live:
                new_id = self._inputs.make_id()
            return request.with_sequence(new_id, True, request.sequence_end)
        if not request.sequence_start:
            raise self._not_started(request)
        sequence = live.get(request.sequence_id)
        if sequence is not None and sequence.is_private:
            raise InvalidArgument(
                f"{request.log_id}sequence id {request.sequence_id} of model '{self._model}' is in use by a request "
                "that named none; choose another id"
            )
        return request

    def _not_started(self, request: InferRequest) -> InvalidArgument:
        return InvalidArgument(
            f"inference request for sequence {request.sequence_id} to model '{self._model}' must specify the START "
            "flag on the first request of the sequence"
        )
