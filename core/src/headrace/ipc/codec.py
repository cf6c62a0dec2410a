"""Requests and answers in messages. A request is::

    call u64 | caller u64 | timeout u64, us | priority u64 | rows u32 | flags u16 | inputs u16
    lengths u32[4] of the texts: id | outputs | way | settings
    texts, then inputs (`headrace.ipc.tensors`)

``call`` is the number of the request, ``caller`` that of the request in whose execution it is made,
0 for none. ``way`` is the model that is asked, its version, and the models that wait for it. An answer is::

    call u64 | status u8 | final u8 | code u8 | spare u8 | outputs u16 | lengths u32[2] of the texts
    texts (the message of an error, and parameters), then outputs

In front of those of a batch, in `Kind.DONE`, are its `Times`, each u64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from struct import error as StructError  # noqa: N812
from types import MappingProxyType
from typing import Any, Final

from headrace.errors import HeadraceError, Rescheduled
from headrace.ipc import json_parts
from headrace.ipc.framing import HEADER_BYTES, Buffer, Frame, Kind, ProtocolError, data_frame
from headrace.ipc.replies import CODE_NUMBERS, ERRORS, AnswerStatus, Reply, Times
from headrace.ipc.tensors import Allocator, TensorReader, TensorWriter, Views, remember
from headrace.messages.request import InferRequest, Parameter
from headrace.messages.response import InferResponse
from headrace.messages.tensor import Tensor, as_tensor
from headrace.messages.ticket import Ticket

_REQUEST = Struct("<QQQQIHHIIII")
_ANSWER = Struct("<QBBBxHII")
_TIMES = Struct("<QQQQ")
#: Between names in a list; no name in a config has it.
_SEPARATOR: Final = "\0"
#: What reading a message that makes no sense may raise.
_NONSENSE: Final = (StructError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)


@dataclass(slots=True, eq=False)
class ReceivedRequest(InferRequest):
    """A request under the number of its call, and what its ticket said at the other side."""

    call: Final[int] = 0
    rows: Final[int] = 1
    pinned: Final[bool] = False

    def _further(self) -> tuple[Any, ...]:
        return self.call, self.rows, self.pinned


#: No request in whose execution another was made.
_NOBODY: Final[Mapping[int, Ticket]] = MappingProxyType({})


class Encoder:
    """Writes requests and answers. ``allocator`` is the arena of this side, or None. One thread at a time."""

    def __init__(self, allocator: Allocator | None) -> None:
        self._tensors = TensorWriter(allocator)
        self._names: dict[tuple[str, ...], bytes] = {}

    def requests(self, batch: Sequence[tuple[int, Ticket]]) -> bytes:
        """A frame of requests for the instance that runs them, each under the number of its call.

        Raises `ValueError` for what cannot travel.
        """
        meta: list[bytes] = []
        data: list[Buffer] = []
        size = 0
        self._tensors.placed.clear()
        try:
            for call, ticket in batch:
                request = ticket.request
                way = self._way(request) if request.callers else b""
                size = self._request(call, 0, request, ticket.rows, ticket.pinned, way, meta, data, size)
            return data_frame(Kind.REQUESTS, len(batch), meta, data, size)
        except Exception as error:
            raise self._undone(error) from error

    def request(self, call: int, request: InferRequest) -> bytes:
        """A frame of one request for another model. Raises `ValueError` for what cannot travel."""
        meta: list[bytes] = []
        data: list[Buffer] = []
        self._tensors.placed.clear()
        caller = request.caller.call if isinstance(request.caller, ReceivedRequest) else 0
        try:
            size = self._request(call, caller, request, 1, False, self._way(request), meta, data, 0)
            return data_frame(Kind.REQUESTS, 1, meta, data, size)
        except Exception as error:
            raise self._undone(error) from error

    def answers(self, replies: Sequence[Reply], times: Times | None = None) -> bytes:
        """A frame of answers: `Kind.DONE` if it has ``times``. Raises `ValueError` for what cannot travel."""
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
            raise self._undone(error) from error

    def _way(self, request: InferRequest) -> bytes:
        return self._list((request.model_name, request.model_version, *request.callers))

    def _request(
        self,
        call: int,
        caller: int,
        request: InferRequest,
        rows: int,
        pinned: bool,
        way: bytes,
        meta: list[bytes],
        data: list[Buffer],
        size: int,
    ) -> int:
        """Append ``request`` to a message with ``size`` bytes of data; returns how many it has then."""
        id_text = request.id.encode(errors="replace") if request.id else b""
        outputs = self._list(tuple(request.outputs)) if request.outputs else b""
        rare = json_parts.pack_settings(request) if request.parameters or request.sequence_id else b""
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
                len(way),
                len(rare),
            )
        )
        meta += (id_text, outputs, way, rare)
        for name, tensor in inputs.items():
            size = self._tensors.write(name, tensor, meta, data, size)  # type: ignore[arg-type]  # no Undecoded here
        return size

    def _answer(self, reply: Reply, meta: list[bytes], data: list[Buffer], size: int) -> int:
        """Append ``reply`` to a message with ``size`` bytes of data; returns how many it has then."""
        answer = reply.answer
        if isinstance(answer, InferResponse):
            rare = json_parts.pack_parameters(answer.parameters) if answer.parameters else b""
            meta.append(_ANSWER.pack(reply.call, reply.status, reply.final, 0, len(answer.outputs), 0, len(rare)))
            meta.append(rare)
            for name, value in answer.outputs.items():
                size = self._tensors.write(name, as_tensor(value), meta, data, size)
            return size
        text = b"" if answer is None else answer.message.encode(errors="replace")
        code = 0 if answer is None else CODE_NUMBERS[answer.code]
        meta.append(_ANSWER.pack(reply.call, reply.status, reply.final, code, 0, len(text), 0))
        meta.append(text)
        return size

    def _list(self, names: tuple[str, ...]) -> bytes:
        """Names in UTF-8."""
        text = self._names.get(names)
        if text is None:
            text = _SEPARATOR.join(names).encode()
            remember(self._names, names, text)
        return text

    def _undone(self, error: Exception) -> ValueError:
        """``error`` for the caller; a message that is not sent leaves nothing in the arena."""
        self._tensors.take_back()
        return ValueError(str(error) or type(error).__name__)


class Decoder:
    """Reads requests and answers. ``views`` is the peer's arena, or None; ``free`` is called with an
    offset in it, on any thread, once nobody looks at what is there."""

    def __init__(self, views: Views | None, free: Callable[[int], None]) -> None:
        self._tensors = TensorReader(views, free)
        self._names: dict[bytes, tuple[str, ...]] = {}

    def requests(
        self, message: Frame, callers: Mapping[int, Ticket] = _NOBODY, model_name: str = "", model_version: str = ""
    ) -> list[ReceivedRequest]:
        """The requests of a frame. Raises `ProtocolError`.

        ``callers`` are those in whose execution they may have been made, by call. Requests that do not say which
        model they ask are for ``model_name``.
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

    def answers(self, message: Frame) -> list[Reply]:
        """The answers of a frame. Raises `ProtocolError`."""
        try:
            replies = []
            position = HEADER_BYTES + (_TIMES.size if message.kind == Kind.DONE else 0)
            for _ in range(message.number):
                reply, position = self._answer(message, position)
                replies.append(reply)
        except _NONSENSE as error:
            raise ProtocolError(f"answers: {type(error).__name__}: {error}") from error
        return replies

    def _request(
        self, message: Frame, position: int, callers: Mapping[int, Ticket], model_name: str, model_version: str
    ) -> tuple[ReceivedRequest, int]:
        """The request at ``position``, and where it ends. Raises `ProtocolError`, and other errors at nonsense."""
        body = message.body
        call, asking, timeout, priority, rows, flags, count, *sizes = _REQUEST.unpack_from(body, position)
        position += _REQUEST.size
        id_text = ""
        outputs: Sequence[str] = ()
        names: Sequence[str] = ()
        settings: tuple[dict[str, Parameter], int | str] | None = None
        if any(sizes):
            id_size, outputs_size, way_size, rare_size = sizes
            texts = position + id_size + outputs_size + way_size + rare_size
            if texts > message.data:
                raise ProtocolError("requests: texts run past the meta")
            id_text = str(body[position : position + id_size], "utf-8")
            position += id_size
            if outputs_size:
                outputs = self._list(bytes(body[position : position + outputs_size]))
            position += outputs_size
            if way_size:
                model_name, model_version, *names = self._list(bytes(body[position : position + way_size]))
            if rare_size:
                settings = json_parts.unpack_settings(bytes(body[texts - rare_size : texts]))
            position = texts
        inputs: dict[str, Any] = {}
        for _ in range(count):
            name, tensor, position = self._tensors.read(message, position)
            inputs[name] = tensor
        parameters, sequence_id = settings or ({}, 0)
        caller = callers.get(asking) if asking else None
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
        )
        return request, position

    def _answer(self, message: Frame, position: int) -> tuple[Reply, int]:
        """The answer at ``position``, and where it ends. Raises `ProtocolError`, and other errors at nonsense."""
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
            for _ in range(count):
                name, outputs[name], position = self._tensors.read(message, position)
            response = InferResponse(outputs, parameters, "", "")
            return Reply(call, AnswerStatus.RESPONSE, bool(final), response), position
        error: HeadraceError | None = None
        if status == AnswerStatus.ERROR:
            error = ERRORS[code](str(body[position : position + text_size], "utf-8"))
        elif status == AnswerStatus.RESCHEDULED:
            error = Rescheduled()
        return Reply(call, AnswerStatus(status), bool(final), error), texts

    def _list(self, text: bytes) -> tuple[str, ...]:
        """The names that `Encoder` wrote."""
        names = self._names.get(text)
        if names is None:
            names = tuple(str(text, "utf-8").split(_SEPARATOR))
            remember(self._names, text, names)
        return names


def read_times(message: Frame) -> Times:
    """The times of a `Kind.DONE`. Raises `ProtocolError`."""
    try:
        times: Times = _TIMES.unpack_from(message.body, HEADER_BYTES)
        return times
    except StructError as error:
        raise ProtocolError(f"times: {error}") from error
