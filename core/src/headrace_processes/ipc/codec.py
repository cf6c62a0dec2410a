"""The binary form of requests and answers. A request is::

    call u64 | caller u64 | timeout u64, us | priority u64 | rows u32 | flags u16 | inputs u16
    lengths u32[4] of the texts: id | outputs | route | settings
    texts, then inputs (`headrace_processes.ipc.tensors`)

``call`` is the number of the request. ``caller`` is the number of the request whose execution made it, or 0. ``route``
is the name of the model, its version, and the models that wait for the answer. An answer is::

    call u64 | status u8 | final u8 | code u8 | spare u8 | outputs u16 | lengths u32[2] of the texts
    texts (the message of an error, and parameters), then outputs

A `Kind.DONE` has the four `Times` of the batch, u64 each, before the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError  # noqa: N812
from types import MappingProxyType
from typing import Any, Final

from headrace.errors import HeadraceError, Rescheduled
from headrace.messages.caller import Caller
from headrace.messages.request import InferRequest, LocatedRequest
from headrace.messages.response import InferResponse
from headrace.messages.tensor import Tensor, as_tensor
from headrace.messages.ticket import Ticket
from headrace_processes.ipc import json_parts
from headrace_processes.ipc.framing import HEADER_BYTES, Buffer, Frame, Kind, ProtocolError, data_frame
from headrace_processes.ipc.replies import CODE_NUMBERS, ERRORS, AnswerStatus, Reply, Times
from headrace_processes.ipc.tensors import (
    INLINE,
    Allocator,
    Bytes,
    ClientMemory,
    Mapped,
    Placed,
    TensorReader,
    TensorWriter,
    Views,
    add_to_cache,
)

_REQUEST = Struct("<QQQQIHHIIII")
_ANSWER = Struct("<QBBBxHII")
_TIMES = Struct("<QQQQ")
#: Separates the names in a list; no name in a config contains it.
_SEPARATOR: Final = "\0"
#: The errors that decoding a malformed message may raise.
_NONSENSE: Final = (StructError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(slots=True, eq=False)
class ReceivedRequest(InferRequest):
    """A request that was received. ``call`` is its number; ``rows`` and ``pinned`` are those of the sender's ticket.
    Its response has `Placed` outputs for ``targets``, or others."""

    call: Final[int] = 0
    rows: Final[int] = 1
    pinned: Final[bool] = False
    #: The client's memory for outputs, by their names; None if there is none.
    targets: Final[Mapping[str, Bytes] | None] = None

    def _further(self) -> tuple[Any, ...]:
        return self.call, self.rows, self.pinned, self.targets


#: No request was sent by the execution of another one.
_NO_CALLERS: Final[Mapping[int, Ticket]] = MappingProxyType({})


class Encoder:
    """Encodes requests and answers. ``allocator`` is the arena of this side, or None. ``clients`` is the memory of
    clients, which the peer can map, for the inputs and targets of batches. One thread at a time."""

    def __init__(self, allocator: Allocator | None, clients: ClientMemory | None = None) -> None:
        self._tensors = TensorWriter(allocator, clients)
        self._clients = clients
        self._names: dict[tuple[str, ...], bytes] = {}
        self._settings: dict[tuple[tuple[str, tuple[int, int, int]], ...], bytes] = {}

    def requests(self, batch: Sequence[tuple[int, Ticket]]) -> bytes:
        """Return a frame with a batch for an instance. ``batch`` holds the number of each request, and its ticket.

        Raises `ValueError` if it cannot be encoded.
        """
        meta: list[bytes] = []
        data: list[Buffer] = []
        size = 0
        self._tensors.placed.clear()
        try:
            for call, ticket in batch:
                request = ticket.request
                route = self._route(request) if request.callers else b""
                sender = request.sender if request.has_terms else None
                size = self._request(call, 0, request, ticket.rows, ticket.pinned, route, meta, data, size, sender)
            return data_frame(Kind.REQUESTS, len(batch), meta, data, size)
        except Exception as error:
            raise self._roll_back(error) from error

    def request(self, call: int, request: InferRequest) -> bytes:
        """Return a frame with one request to another model. Raises `ValueError` if it cannot be encoded."""
        meta: list[bytes] = []
        data: list[Buffer] = []
        self._tensors.placed.clear()
        caller = request.caller.call if isinstance(request.caller, ReceivedRequest) else 0
        try:
            size = self._request(call, caller, request, 1, False, self._route(request), meta, data, 0)
            return data_frame(Kind.REQUESTS, 1, meta, data, size)
        except Exception as error:
            raise self._roll_back(error) from error

    def answers(self, replies: Sequence[Reply], times: Times | None = None) -> bytes:
        """Return a frame of answers: `Kind.DONE` with ``times``, else `Kind.ANSWERS`. Raises `ValueError`."""
        kind = Kind.ANSWERS if times is None else Kind.DONE
        meta: list[bytes] = [] if times is None else [_TIMES.pack(*times)]
        data: list[Buffer] = []
        size = 0
        self._tensors.placed.clear()
        try:
            for reply in replies:
                size = self._answer(reply, meta, data, size)
            return data_frame(kind, len(replies), meta, data, size)
        except Exception as error:
            raise self._roll_back(error) from error

    def _route(self, request: InferRequest) -> bytes:
        return self._list((request.model_name, request.model_version, *request.callers))

    def _request(
        self,
        call: int,
        caller: int,
        request: InferRequest,
        rows: int,
        pinned: bool,
        route: bytes,
        meta: list[bytes],
        data: list[Buffer],
        size: int,
        sender: Caller | None = None,
    ) -> int:
        """Append ``request`` of ``sender`` to a message with ``size`` bytes of data. Return the new size."""
        id_text = request.id.encode(errors="replace") if request.id else b""
        outputs = self._list(tuple(request.outputs)) if request.outputs else b""
        targets = self._targets(request) if type(request) is LocatedRequest else None
        if request.parameters or request.sequence_id or sender:
            rare = json_parts.pack_settings(request, sender, targets)
        else:
            rare = self._only_targets(request, targets) if targets else b""
        flags = request.sequence_start | request.sequence_end << 1 | request.decoupled << 2 | pinned << 3
        inputs = request.inputs
        meta.append(
            _REQUEST.pack(
                call,
                caller,
                request.timeout_us,
                request.priority,
                rows,
                flags,
                len(inputs),
                len(id_text),
                len(outputs),
                len(route),
                len(rare),
            )
        )
        meta += (id_text, outputs, route, rare)
        for name, tensor in inputs.items():
            size = self._tensors.write_input(name, tensor, meta, data, size)  # type: ignore[arg-type]  # no Undecoded
        return size

    def _only_targets(self, request: InferRequest, targets: Mapping[str, tuple[int, int, int]]) -> bytes:
        """Return the settings of a request that has ``targets`` and nothing else. Cached."""
        key = tuple(targets.items())
        text = self._settings.get(key)
        if text is None:
            text = json_parts.pack_settings(request, None, targets)
            add_to_cache(self._settings, key, text)
        return text

    def _targets(self, request: LocatedRequest) -> dict[str, tuple[int, int, int]]:
        """Return the targets of ``request`` that the peer can map."""
        targets: dict[str, tuple[int, int, int]] = {}
        for name, memory in request.targets.items() if self._clients is not None else ():
            if memory.nbytes >= INLINE and (place := self._clients.place(memory)) is not None:  # type: ignore[union-attr]
                targets[name] = (*place, memory.nbytes)
        return targets

    def _answer(self, reply: Reply, meta: list[bytes], data: list[Buffer], size: int) -> int:
        """Append ``reply`` to a message with ``size`` bytes of data. Return the new size."""
        answer = reply.answer
        if isinstance(answer, InferResponse):
            rare = json_parts.pack_parameters(answer.parameters) if answer.parameters else b""
            meta.append(_ANSWER.pack(reply.call, reply.status, reply.final, 0, len(answer.outputs), 0, len(rare)))
            meta.append(rare)
            outputs: Mapping[str, Any] = answer.outputs
            for name, value in outputs.items():
                if type(value) is Placed:
                    self._tensors.write_placed(name, value, meta)
                else:
                    size = self._tensors.write(name, as_tensor(value), meta, data, size)
            return size
        text = b"" if answer is None else answer.message.encode(errors="replace")
        code = 0 if answer is None else CODE_NUMBERS[answer.code]
        meta.append(_ANSWER.pack(reply.call, reply.status, reply.final, code, 0, len(text), 0))
        meta.append(text)
        return size

    def _list(self, names: tuple[str, ...]) -> bytes:
        """Return ``names`` as one text in UTF-8, with separators. Cached."""
        text = self._names.get(names)
        if text is None:
            text = _SEPARATOR.join(names).encode()
            add_to_cache(self._names, names, text)
        return text

    def _roll_back(self, error: Exception) -> ValueError:
        """Free the blocks of the message in the arena, and return ``error`` as the `ValueError` for the caller."""
        self._tensors.free_placed()
        return ValueError(str(error) or type(error).__name__)


class Decoder:
    """Decodes requests and answers. ``views`` is the peer's arena, or None. ``free`` is called with an offset in it
    once the last view of the tensor there is freed, on any thread. ``clients`` is the memory of clients that the peer
    has sent."""

    def __init__(self, views: Views | None, free: Callable[[int], None], clients: Mapped | None = None) -> None:
        self._tensors = TensorReader(views, free, clients)
        self._clients = clients
        self._names: dict[bytes, tuple[str, ...]] = {}
        self._settings: dict[bytes, json_parts.RareSettings] = {}

    def requests(
        self, message: Frame, callers: Mapping[int, Ticket] = _NO_CALLERS, model_name: str = "", model_version: str = ""
    ) -> list[ReceivedRequest]:
        """Return the requests of a frame. Raises `ProtocolError`.

        ``callers`` are the requests whose execution may have made them, by number. A request that names no model is for
        ``model_name`` and ``model_version``.
        """
        try:
            requests = []
            position = HEADER_BYTES
            for _ in range(message.number):
                request, position = self._request(message, position, callers, model_name, model_version)
                requests.append(request)
        except _NONSENSE as error:
            raise ProtocolError(f"requests: {type(error).__name__}: {error}") from error
        return requests

    def answers(self, message: Frame, in_flight: Mapping[int, Ticket] = _NO_CALLERS) -> list[Reply]:
        """Return the answers of an ANSWERS or DONE frame to requests ``in_flight``, by number. Raises `ProtocolError`.

        ``in_flight`` is needed only for outputs with a target.
        """
        try:
            replies = []
            position = HEADER_BYTES + (_TIMES.size if message.kind == Kind.DONE else 0)
            for _ in range(message.number):
                reply, position = self._answer(message, position, in_flight)
                replies.append(reply)
        except _NONSENSE as error:
            raise ProtocolError(f"answers: {type(error).__name__}: {error}") from error
        return replies

    def _request(
        self, message: Frame, position: int, callers: Mapping[int, Ticket], model_name: str, model_version: str
    ) -> tuple[ReceivedRequest, int]:
        """Return the request at ``position``, and its end. Raises `ProtocolError` or one of `_NONSENSE` if it is
        malformed."""
        body = message.body
        call, caller_number, timeout, priority, rows, flags, count, *sizes = _REQUEST.unpack_from(body, position)
        position += _REQUEST.size
        id_text = ""
        outputs: Sequence[str] = ()
        names: Sequence[str] = ()
        settings = json_parts.NO_SETTINGS
        if any(sizes):
            id_size, outputs_size, route_size, rare_size = sizes
            texts = position + id_size + outputs_size + route_size + rare_size
            if texts > message.data:
                raise ProtocolError("requests: texts run past the meta")
            id_text = str(body[position : position + id_size], "utf-8")
            position += id_size
            if outputs_size:
                outputs = self._list(bytes(body[position : position + outputs_size]))
            position += outputs_size
            if route_size:
                model_name, model_version, *names = self._list(bytes(body[position : position + route_size]))
            if rare_size:
                settings = self._read_settings(bytes(body[texts - rare_size : texts]))
            position = texts
        inputs: dict[str, Any] = {}
        for _ in range(count):
            name, tensor, position = self._tensors.read(message, position)
            inputs[name] = tensor
        parameters, sequence_id, sender, places = settings
        caller = callers.get(caller_number) if caller_number else None
        request = ReceivedRequest(
            model_name,
            inputs,
            outputs,
            id_text,
            model_version,
            parameters,
            priority,
            timeout,
            sequence_id,
            bool(flags & 1),
            bool(flags & 2),
            tuple(names),
            None if caller is None else caller.request,
            bool(flags & 4),
            None,
            call,
            rows,
            bool(flags & 8),
            {name: self._clients.view(*place) for name, place in places.items()} if places and self._clients else None,
        )
        if sender is not None and callers is _NO_CALLERS:  # for requests of a model, the server sets the sender itself
            request.send_as(sender)
        return request, position

    def _answer(self, message: Frame, position: int, in_flight: Mapping[int, Ticket]) -> tuple[Reply, int]:
        """Return the answer at ``position``, and its end. Raises `ProtocolError` or one of `_NONSENSE` if it is
        malformed."""
        body = message.body
        call, status, final, code, count, text_size, rare_size = _ANSWER.unpack_from(body, position)
        position += _ANSWER.size
        texts = position + text_size + rare_size
        if texts > message.data:
            raise ProtocolError("answers: texts run past the meta")
        if status == AnswerStatus.RESPONSE:
            parameters = json_parts.unpack_parameters(bytes(body[texts - rare_size : texts])) if rare_size else {}
            position = texts
            outputs: dict[str, Tensor] = {}
            ticket = in_flight.get(call)
            targets = None if ticket is None else getattr(ticket.request, "targets", None)
            for _ in range(count):
                name, outputs[name], position = self._tensors.read(message, position, targets)
            response = InferResponse(outputs, parameters, "", "")
            return Reply(call, AnswerStatus.RESPONSE, bool(final), response), position
        error: HeadraceError | None = None
        if status == AnswerStatus.ERROR:
            error = ERRORS[code](str(body[position : position + text_size], "utf-8"))
        elif status == AnswerStatus.RESCHEDULED:
            error = Rescheduled()
        return Reply(call, AnswerStatus(status), bool(final), error), texts

    def _read_settings(self, text: bytes) -> json_parts.RareSettings:
        """Return the settings in ``text``. Cached if they are only targets, because these repeat."""
        settings = self._settings.get(text)
        if settings is None:
            settings = json_parts.unpack_settings(text)
            if settings.targets and not settings.parameters and not settings.sequence_id and settings.sender is None:
                add_to_cache(self._settings, text, settings)
            return settings
        return settings._replace(parameters={})  # each request has its own

    def _list(self, text: bytes) -> tuple[str, ...]:
        """Return the names that `Encoder` wrote as ``text``. Cached."""
        names = self._names.get(text)
        if names is None:
            names = tuple(str(text, "utf-8").split(_SEPARATOR))
            add_to_cache(self._names, text, names)
        return names


def read_times(message: Frame) -> Times:
    """Return the times of a `Kind.DONE`. Raises `ProtocolError`."""
    try:
        times: Times = _TIMES.unpack_from(message.body, HEADER_BYTES)
        return times
    except StructError as error:
        raise ProtocolError(f"times: {error}") from error
