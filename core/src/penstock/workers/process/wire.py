"""The messages between the server and a child: a fixed binary schema, version `VERSION`.

A message is a frame::

    header   total u32 (a multiple of 8, header included) | kind u8 | spare u8 | number u16 | data u32
    meta     what the kind says, `number` times
    data     tensors that travel inside, each at a multiple of 8 bytes; begins at `data`

and a tensor in the meta is::

    header length u16 | place u8 | bytes u64 | offset u64, within the data or the arena
    header   data type u8 (as in a config) | rank u8 | shape i64[rank] | name, UTF-8

Tensors of `INLINE` bytes or more are placed in the sender's arena while there is room. Neither
side believes the other: everything is checked against the frame and the arena while it is read,
and `WireError` says that the peer is broken. Integers are little-endian; nothing is ever unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from math import prod
from struct import Struct
from struct import error as StructError  # noqa: N812
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from penstock.errors import (
    AlreadyExists,
    BackendError,
    Cancelled,
    Code,
    InvalidArgument,
    NotFound,
    PenstockError,
    Unavailable,
    Unsupported,
)
from penstock.messages import dtypes
from penstock.messages.request import InferRequest
from penstock.messages.response import InferResponse
from penstock.messages.tensor import BytesTensor, Tensor, as_tensor, data_type, wire_view
from penstock.workers.process import settings
from penstock.workers.process.failure import WireError

VERSION: Final = 1
#: Bytes from which a tensor is placed in the arena.
INLINE: Final = 32 * 1024
#: A frame may not be larger than this; a tensor over it needs room in the arena.
MOST_BYTES: Final = (1 << 32) - 8
#: Different shapes and lists of names that are remembered in encoded form.
_REMEMBERED: Final = 1024

Buffer: TypeAlias = "bytes | bytearray | memoryview"

_HEADER = Struct("<IBxHI")
_REQUEST = Struct("<QQQQIHHIIII")
_ANSWER = Struct("<QBBBxHII")
_TENSOR = Struct("<HBQQ")
_TIMES = Struct("<QQQQ")
_INTEGER = Struct("<Q")
HEADER_BYTES: Final = _HEADER.size


class Kind(IntEnum):
    """What a frame says. To the child: LOAD, RUN, STOP, CHECK, RESULT, REPLIES. From it: LOADED,
    FAILED, DONE, ANSWERS, CHECKED, INFER, CALL, NOTE. Both ways: CANCEL, READ, RELEASE."""

    LOAD = 1  # JSON: an order
    LOADED = 2  # JSON: what the parent needs to know of the instance
    FAILED = 3  # JSON: code, message
    RUN = 4  # requests: one batch
    DONE = 5  # times, answers: the batch has run; statuses may be LATER
    ANSWERS = 6  # answers that `RUN` did not give, final or not
    STOP = 7  # close the instance and exit
    CANCEL = 8  # integers: requests whose callers have gone
    READ = 9  # integers: requests of which one response each has been read
    RELEASE = 10  # integers: offsets in the arena of the receiver that are free again
    CHECK = 11  # ask the instance whether it is ready
    CHECKED = 12  # JSON: ready, reason
    INFER = 13  # requests to other models
    REPLIES = 14  # answers to `INFER`
    CALL = 15  # JSON: id, method, arguments
    RESULT = 16  # JSON: id, and value or code and message
    NOTE = 17  # JSON: method, arguments; wants no answer


class Status(IntEnum):
    """What an answer is."""

    RESPONSE = 0
    ERROR = 1
    NOTHING = 2
    LATER = 3


class Frame(NamedTuple):
    """One message. ``body`` is the whole frame; ``data`` is where its tensors begin."""

    kind: Kind
    number: int
    body: Buffer
    data: int

    @property
    def text(self) -> bytes:
        """The meta of a `json_frame`."""
        return bytes(self.body[HEADER_BYTES : self.data]).rstrip(b"\0")


class Reply(NamedTuple):
    """An answer as it travels. ``answer`` is None for NOTHING and for LATER."""

    call: int
    status: Status
    final: bool
    answer: InferResponse | PenstockError | None


class Times(NamedTuple):
    """`penstock.telemetry.statistics.BatchTimes` as it travels; one clock for all processes."""

    start_ns: int
    input_end_ns: int
    infer_end_ns: int
    end_ns: int


class Places(Protocol):
    """Where large tensors are put: the `penstock.workers.process.arena.Writer` of this side."""

    def place(self, data: memoryview) -> int | None: ...

    def release(self, offset: int) -> None: ...


class Views(Protocol):
    """Where the peer's large tensors are: the `penstock.workers.process.arena.Reader`."""

    def view(self, offset: int, nbytes: int, on_free: Callable[[int], None]) -> Any: ...


def frame(kind: Kind, count: int, meta: bytes = b"") -> bytes:
    """A message without tensors."""
    end = HEADER_BYTES + len(meta)
    total = -(-end // 8) * 8
    return _HEADER.pack(total, kind, count, total) + meta + bytes(total - end)


def integers_frame(kind: Kind, values: Sequence[int]) -> bytes:
    """A message of integers u64."""
    return frame(kind, len(values), b"".join(map(_INTEGER.pack, values)))


def read_integers(message: Frame) -> list[int]:
    """The values of an `integers_frame`."""
    if HEADER_BYTES + 8 * message.number > len(message.body):
        raise WireError(f"{message.kind.name}: {message.number} integers do not fit")
    return [_INTEGER.unpack_from(message.body, HEADER_BYTES + 8 * index)[0] for index in range(message.number)]


#: Makes a request of the number of its call, that of the call which asks (0 for none), and its inputs.
Make: TypeAlias = Callable[[int, int, dict[str, Any]], InferRequest]


class Frames:
    """Cuts what a socket has received into frames. ``writable`` ones own a buffer of their own."""

    def __init__(self, writable: bool = False) -> None:
        self._rest = bytearray()
        self._wanted = HEADER_BYTES
        self._writable = writable

    def feed(self, data: bytes | bytearray) -> Iterator[Frame]:
        """The frames that ``data`` completes. Raises `WireError`."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            source: bytes | bytearray = self._rest
            self._rest = bytearray()
        else:
            source = data
        position, end = 0, len(source)
        while position < end:
            if end - position < HEADER_BYTES:
                self._wanted = HEADER_BYTES
                break
            total, kind, count, begin = _HEADER.unpack_from(source, position)
            if total < HEADER_BYTES or total % 8 or not HEADER_BYTES <= begin <= total:
                raise WireError(f"a frame of {total} bytes whose data begins at {begin}")
            if kind not in _KINDS:
                raise WireError(f"a frame of kind {kind}")
            if end - position < total:
                self._wanted = total
                break
            yield Frame(_KINDS[kind], count, self._cut(source, position, total), begin)
            position += total
        if position < end:
            self._rest = bytearray(memoryview(source)[position:])

    def _cut(self, source: bytes | bytearray, position: int, total: int) -> Buffer:
        whole = total == len(source)
        if self._writable:
            return source if whole and isinstance(source, bytearray) else bytearray(source[position : position + total])
        return source if whole else source[position : position + total]


class Encoder:
    """Writes requests and answers. ``places`` is the arena of this side, or None. One thread at a time."""

    def __init__(self, places: Places | None) -> None:
        self._places = places
        #: Where the message that is being written has put tensors.
        self._placed: list[int] = []
        self._headers: dict[Any, bytes] = {}
        self._lists: dict[tuple[str, ...], bytes] = {}

    def requests(self, kind: Kind, batch: Sequence[tuple[int, InferRequest]]) -> bytes:
        """A frame of requests, each under the number of its call. Raises `ValueError` for what cannot travel."""
        meta: list[bytes] = []
        data: list[Buffer] = []
        size = 0
        self._placed.clear()
        try:
            for call, request in batch:
                size = self._request(call, request, kind is Kind.INFER, meta, data, size)
            return _join(kind, len(batch), meta, data, size)
        except Exception as error:
            raise self._undone(error) from error

    def answers(self, kind: Kind, replies: Sequence[Reply], times: Times | None = None) -> bytes:
        """A frame of answers; `Kind.DONE` has ``times``. Raises `ValueError` for what cannot travel."""
        meta: list[bytes] = [] if times is None else [_TIMES.pack(*times)]
        data: list[Buffer] = []
        size = 0
        self._placed.clear()
        try:
            for reply in replies:
                size = self._answer(reply, meta, data, size)
            return _join(kind, len(replies), meta, data, size)
        except Exception as error:
            raise self._undone(error) from error

    def _undone(self, error: Exception) -> ValueError:
        """``error`` for the caller; a message that is not sent leaves nothing in the arena."""
        if self._places is not None:
            for offset in self._placed:
                self._places.release(offset)
        return ValueError(str(error) or type(error).__name__)

    def _request(
        self, call: int, request: InferRequest, addressed: bool, meta: list[bytes], data: list[Buffer], size: int
    ) -> int:
        id_text = request.id.encode(errors="replace") if request.id else b""
        outputs = self._names(tuple(request.outputs)) if request.outputs else b""
        way = self._way(request, addressed)
        rare = settings.pack(request) if request.parameters or request.sequence_id else b""
        flags = request.sequence_start | request.sequence_end << 1 | request.decoupled << 2
        inputs = request.inputs
        meta.append(
            _REQUEST.pack(
                call,
                getattr(request.caller, "call", 0) if addressed else 0,
                request.timeout_us,
                request.priority,
                request.rows,
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
            size = self._tensor(name, tensor, meta, data, size)  # type: ignore[arg-type]  # Undecoded never gets here
        return size

    def _way(self, request: InferRequest, addressed: bool) -> bytes:
        """The model asked, its version, and the models that wait; nothing for a client's request."""
        if not (addressed or request.callers):
            return b""
        return self._names((request.model_name, request.model_version, *request.callers))

    def _answer(self, reply: Reply, meta: list[bytes], data: list[Buffer], size: int) -> int:
        answer = reply.answer
        if isinstance(answer, InferResponse):
            rare = settings.pack_parameters(answer.parameters) if answer.parameters else b""
            meta.append(_ANSWER.pack(reply.call, reply.status, reply.final, 0, len(answer.outputs), 0, len(rare)))
            meta.append(rare)
            for name, value in answer.outputs.items():
                size = self._tensor(name, as_tensor(value), meta, data, size)
            return size
        text = b"" if answer is None else answer.message.encode(errors="replace")
        code = 0 if answer is None else _NUMBERS[answer.code]
        meta.append(_ANSWER.pack(reply.call, reply.status, reply.final, code, 0, len(text), 0))
        meta.append(text)
        return size

    def _tensor(self, name: str, tensor: Tensor, meta: list[bytes], data: list[Buffer], size: int) -> int:
        """Append ``tensor``; returns the bytes of data so far."""
        header = self._header(name, tensor)
        content = wire_view(tensor)
        nbytes = content.nbytes
        if nbytes >= INLINE and self._places is not None:
            offset = self._places.place(content)
            if offset is not None:
                self._placed.append(offset)
                meta += (_TENSOR.pack(len(header), 1, nbytes, offset), header)
                return size
        meta += (_TENSOR.pack(len(header), 0, nbytes, size), header)
        data.append(content)
        if rest := -nbytes % 8:
            data.append(_PADDING[rest])
        return size + nbytes + rest

    def _header(self, name: str, tensor: Tensor) -> bytes:
        key = (name, tensor.shape, None if type(tensor) is BytesTensor else tensor.dtype)  # type: ignore[union-attr]
        header = self._headers.get(key)
        if header is None:
            shape = tensor.shape
            value = data_type(tensor).config_value
            header = Struct(f"<BB{len(shape)}q").pack(value, len(shape), *shape) + name.encode()
            _remember(self._headers, key, header)
        return header

    def _names(self, names: tuple[str, ...]) -> bytes:
        text = self._lists.get(names)
        if text is None:
            text = _SEPARATOR.join(names).encode()
            _remember(self._lists, names, text)
        return text


class Decoder:
    """Reads requests and answers. ``views`` is the peer's arena, or None; ``free`` is called with an
    offset in it, on any thread, once nobody looks at what is there."""

    def __init__(self, views: Views | None, free: Callable[[int], None]) -> None:
        self._views, self._free = views, free
        self._headers: dict[bytes, tuple[str, dtypes.DataType, tuple[int, ...], int]] = {}
        self._lists: dict[bytes, tuple[str, ...]] = {}

    def requests(self, message: Frame, make: Make) -> list[InferRequest]:
        """The requests of a frame, each made by ``make``. Raises `WireError`."""
        try:
            requests = []
            position = HEADER_BYTES
            for _ in range(message.number):
                request, position = self._request(message, position, make)
                requests.append(request)
        except _NONSENSE as error:
            raise WireError(f"{message.kind.name}: {type(error).__name__}: {error}") from error
        return requests

    def answers(self, message: Frame) -> list[Reply]:
        """The answers of a frame. Raises `WireError`."""
        try:
            replies = []
            position = HEADER_BYTES + (_TIMES.size if message.kind is Kind.DONE else 0)
            for _ in range(message.number):
                reply, position = self._answer(message, position)
                replies.append(reply)
        except _NONSENSE as error:
            raise WireError(f"{message.kind.name}: {type(error).__name__}: {error}") from error
        return replies

    def _request(self, message: Frame, position: int, make: Make) -> tuple[InferRequest, int]:
        body = message.body
        call, caller, timeout, priority, rows, flags, count, *sizes = _REQUEST.unpack_from(body, position)
        id_size, outputs_size, way_size, rare_size = sizes
        position += _REQUEST.size
        texts = position + id_size + outputs_size + way_size + rare_size
        if texts > message.data:
            raise WireError(f"{message.kind.name}: texts run past the meta")
        id_text = str(body[position : position + id_size], "utf-8") if id_size else ""
        position += id_size
        outputs = self._names(bytes(body[position : position + outputs_size])) if outputs_size else ()
        position += outputs_size
        way = self._names(bytes(body[position : position + way_size])) if way_size else ()
        rare = bytes(body[texts - rare_size : texts])
        position = texts
        inputs: dict[str, Any] = {}
        for _ in range(count):
            name, inputs_tensor, position = self._tensor(message, position)
            inputs[name] = inputs_tensor
        request = make(call, caller, inputs)
        request.id, request.outputs, request.rows = id_text, outputs, rows
        request.timeout_us, request.priority = timeout, priority
        if flags:
            request.sequence_start, request.sequence_end = bool(flags & 1), bool(flags & 2)
            request.decoupled = bool(flags & 4)
        if way:
            request.model_name, request.model_version, *callers = way
            request.callers = tuple(callers)
        if rare:
            settings.apply(rare, request)
        return request, position

    def _answer(self, message: Frame, position: int) -> tuple[Reply, int]:
        body = message.body
        call, status, final, code, count, text_size, rare_size = _ANSWER.unpack_from(body, position)
        position += _ANSWER.size
        texts = position + text_size + rare_size
        if texts > message.data:
            raise WireError(f"{message.kind.name}: texts run past the meta")
        if status == Status.RESPONSE:
            parameters = settings.unpack(bytes(body[texts - rare_size : texts])) if rare_size else {}
            position = texts
            outputs: dict[str, Tensor] = {}
            for _ in range(count):
                name, outputs[name], position = self._tensor(message, position)
            return Reply(call, Status.RESPONSE, bool(final), InferResponse(outputs, parameters)), position
        error = None
        if status == Status.ERROR:
            error = _ERRORS[code](str(body[position : position + text_size], "utf-8"))
        return Reply(call, Status(status), bool(final), error), texts

    def _tensor(self, message: Frame, position: int) -> tuple[str, Tensor, int]:
        body = message.body
        header_size, place, nbytes, offset = _TENSOR.unpack_from(body, position)
        position += _TENSOR.size
        end = position + header_size
        key = bytes(body[position:end])
        known = self._headers.get(key)
        name, datatype, shape, expected = known or self._header(key)
        if expected not in (nbytes, -1):
            raise WireError(f"{message.kind.name}: {nbytes} bytes for {datatype}{list(shape)}")
        content: Any
        if place:
            if self._views is None:
                raise WireError(f"{message.kind.name}: there is no arena")
            content, begin = self._views.view(offset, nbytes, self._free), 0
        else:
            content, begin = body, message.data + offset
            if begin + nbytes > len(body):
                raise WireError(f"{message.kind.name}: a tensor runs past the frame")
        if expected == -1:
            return name, BytesTensor(memoryview(content)[begin : begin + nbytes], shape), end
        count = nbytes // datatype.itemsize
        return name, np.frombuffer(content, datatype.numpy, count, begin).reshape(shape), end

    def _header(self, key: bytes) -> tuple[str, dtypes.DataType, tuple[int, ...], int]:
        value, rank = key[0], key[1]
        shape = Struct(f"<{rank}q").unpack_from(key, 2)
        if any(dim < 0 for dim in shape):
            raise WireError(f"a shape {list(shape)}")
        datatype = dtypes.BY_CONFIG_VALUE[value]
        expected = prod(shape) * datatype.itemsize if datatype is not dtypes.BYTES else -1
        found = str(key[2 + 8 * rank :], "utf-8"), datatype, shape, expected
        _remember(self._headers, key, found)
        return found

    def _names(self, text: bytes) -> tuple[str, ...]:
        names = self._lists.get(text)
        if names is None:
            names = tuple(str(text, "utf-8").split(_SEPARATOR))
            _remember(self._lists, text, names)
        return names


def read_times(message: Frame) -> Times:
    """The times of a `Kind.DONE`."""
    try:
        return Times(*_TIMES.unpack_from(message.body, HEADER_BYTES))
    except StructError as error:
        raise WireError(f"DONE: {error}") from error


_KINDS: Final = {int(kind): kind for kind in Kind}
#: Between the names of a list; no name in a config has it.
_SEPARATOR: Final = "\0"
#: What reading a message that makes no sense may raise.
_NONSENSE: Final = (StructError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
_PADDING: Final = [bytes(count) for count in range(8)]
_NUMBERS: Final = {code: number for number, code in enumerate(Code)}
#: The class of an error that has travelled, by the number of its code.
_ERRORS: Final = {
    _NUMBERS[kind.code]: kind
    for kind in (
        PenstockError,
        BackendError,
        NotFound,
        InvalidArgument,
        Unavailable,
        Unsupported,
        AlreadyExists,
        Cancelled,
    )
}


def _join(kind: Kind, count: int, meta: list[bytes], data: list[Buffer], size: int) -> bytes:
    head = b"".join(meta)
    end = HEADER_BYTES + len(head)
    begin = -(-end // 8) * 8
    total = begin + size
    if total > MOST_BYTES:
        raise ValueError(f"a message of {total} bytes, the limit is {MOST_BYTES}")
    return b"".join((_HEADER.pack(total, kind, count, begin), head, _PADDING[begin - end], *data))


def _remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Clients choose shapes and names: what is remembered of them is bounded."""
    if len(known) >= _REMEMBERED:
        known.clear()
    known[key] = value
