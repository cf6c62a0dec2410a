"""Requests and answers that differ from others before them in the bytes of their tensors only, many in a message.

What they have in common is a `Layout`. The side that sends describes it once, under a number (`Kind.LAYOUT`), and a
message of requests or last answers of that layout has, in front of their tensors::

    requests    layout u32 | bytes of the ids u32 | call of the first u64 | characters of each id u32[n] | the ids
    done        layout u32 | spare u32 | call of the first u64 | times u64[4]
    tensors     one after the other those of the first name, then, at a multiple of 8 bytes, those of the second

The calls of requests, and of a batch that is done, follow one another, and where there are no ids, there are no
characters either.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import prod
from struct import Struct, pack, unpack_from
from struct import error as StructError  # noqa: N812
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from headrace.ipc.framing import HEADER_BYTES, PADDING, Buffer, Frame, Kind, ProtocolError, data_frame, head
from headrace.ipc.json_parts import json_frame, read_json
from headrace.ipc.replies import Times
from headrace.ipc.tensors import INLINE
from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import Tensor

#: Layouts that one side remembers of what it has sent, those included that it has met only once. Clients choose shapes.
MOST_LAYOUTS: Final = 1024
#: So many requests or answers are sent in a message.
MOST_ALIKE: Final = 4096

_REQUESTS = Struct("<IIQ")
_DONE = Struct("<IxxxxQQQQQ")
#: What of one request, or of the answers to a batch of one, its layout does not say.
_LONE_REQUEST, _LONE_DONE = Struct("<Qxxxx"), Struct("<QQQQQxxxx")
_NONSENSE: Final = (StructError, ValueError, LookupError, TypeError, OverflowError)

#: The tensors of one request or answer.
Tensors: TypeAlias = "dict[str, np.ndarray[Any, Any]]"


class Column(NamedTuple):
    """One tensor of each. ``nbytes`` is of each, too."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    nbytes: int


class Layout:
    """What requests to a model, or answers of one, have in common: all but ids and the bytes of their tensors.

    ``outputs`` are those asked for, and nothing for answers. ``rows`` and ``callers`` are said of requests that an
    instance is to run, and of nothing else. Compared and hashed by identity.
    """

    __slots__ = (
        "callers", "columns", "lone_done", "lone_request", "model_name", "model_version", "names", "number", "outputs",
        "rows",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        model_name: str,
        model_version: str,
        outputs: Sequence[str],
        columns: Sequence[Column],
        rows: int = 0,
        callers: Sequence[str] = (),
    ) -> None:
        self.number = number
        self.model_name, self.model_version, self.outputs = model_name, model_version, tuple(outputs)
        self.columns = tuple(columns)
        self.names = tuple(column.name for column in columns)
        self.rows, self.callers = rows, tuple(callers)
        #: How a message of one request, and of the answers to a batch of one, begin; nothing if there is more to write
        #: than their numbers and the tensors.
        self.lone_request = self._lone(Kind.ALIKE_REQUESTS, _REQUESTS.size)
        self.lone_done = self._lone(Kind.ALIKE_DONE, _DONE.size)

    def _lone(self, kind: Kind, meta_bytes: int) -> bytes:
        if any(column.nbytes % 8 for column in self.columns):
            return b""
        begin = -(-(HEADER_BYTES + meta_bytes) // 8) * 8
        return head(kind, 1, begin, begin + sum(column.nbytes for column in self.columns)) + pack("<Ixxxx", self.number)


class AlikeRequests(NamedTuple):
    """Requests of one layout, as they have arrived. ``ids`` is empty where none has one."""

    layout: Layout
    first_call: int
    ids: Sequence[str]
    inputs: Sequence[Tensors]


class AlikeDone(NamedTuple):
    """The last answers to a whole batch, as they have arrived: those of the calls from ``first_call`` on."""

    layout: Layout
    first_call: int
    times: Times
    outputs: Sequence[Tensors]


def request_key(request: InferRequest) -> Hashable:
    """What is equal among requests of one layout to one model; None for one that has none. It has passed
    `Signature.check`, or a layout of this key says that it would."""
    inputs = request.inputs
    outputs = request.outputs
    if len(inputs) == 1:
        ((name, tensor),) = inputs.items()
        if type(tensor) is not np.ndarray:
            return None
        return request.model_version, tuple(outputs) if outputs else (), name, tensor.shape, tensor.dtype
    tensors = _tensors_key(inputs)
    return tensors and (request.model_version, tuple(outputs) if outputs else (), tensors)


def answer_key(response: InferResponse) -> Hashable:
    """The same for responses, of any model."""
    outputs = response.outputs
    if len(outputs) == 1:
        ((name, tensor),) = outputs.items()
        if type(tensor) is not np.ndarray:
            return None
        return response.model_name, response.model_version, name, tensor.shape, tensor.dtype
    tensors = _tensors_key(outputs)
    return tensors and (response.model_name, response.model_version, tensors)


def _tensors_key(tensors: Mapping[str, Any]) -> tuple[Hashable, ...] | None:
    found: list[Hashable] = []
    for name, tensor in tensors.items():
        if type(tensor) is not np.ndarray:
            return None
        found += (name, tensor.shape, tensor.dtype)
    return tuple(found)


def is_plain(request: InferRequest) -> bool:
    """Whether a client's ``request`` says nothing that its layout and its id do not say."""
    return not (
        request.parameters
        or request.sequence_id
        or request.sequence_start
        or request.sequence_end
        or request.priority
        or request.timeout_us
    )


# ---------------------------------------------------------------------- the side that sends


class LayoutWriter:
    """The layouts of what one side sends. One thread at a time."""

    def __init__(self) -> None:
        #: By what tells them apart; None for what was met once, or cannot have one. Read it, and `meet` what is not
        #: there, or None.
        self.known: dict[Hashable, Layout | None] = {}
        self._count = 0
        #: What the peer has under each number.
        self._described: list[Layout | None] = [None] * MOST_LAYOUTS

    def meet(
        self,
        key: Hashable,
        model_name: str,
        model_version: str,
        outputs: Sequence[str],
        tensors: Mapping[str, Any],
        rows: int = 0,
        callers: Sequence[str] = (),
    ) -> Layout | None:
        """The layout for ``key``, if that has been met before: a shape that never comes again is not worth one."""
        known = self.known
        if key not in known:
            if len(known) >= MOST_LAYOUTS:
                self.forget()
            known[key] = None
            return None
        columns = _columns(tensors)
        if columns is None:
            return None
        known[key] = layout = Layout(self._count, model_name, model_version, outputs, columns, rows, callers)
        self._count += 1
        return layout

    def layout_of(self, answer: Answer) -> Layout | None:
        """The layout of a last answer; None for one that is no response, says more than tensors, or is met first."""
        if type(answer) is not InferResponse or answer.parameters:
            return None
        key = answer_key(answer)
        if key is None:
            return None
        layout = self.known.get(key)
        if layout is None:
            layout = self.meet(key, answer.model_name, answer.model_version, (), answer.outputs)
        return layout

    def forget(self) -> None:
        """Begin anew. Layouts that were given out can still be used."""
        self.known.clear()
        self._count = 0

    def requests(self, layout: Layout, first_call: int, requests: Sequence[InferRequest]) -> bytes:
        """One message, or two, of requests of ``layout`` whose calls follow ``first_call``. At most `MOST_ALIKE`."""
        if len(requests) == 1 and layout.lone_request and self._described[layout.number] is layout:
            (request,) = requests
            if not request.id:
                return layout.lone_request + _LONE_REQUEST.pack(first_call) + _joined(layout, request.inputs)
        ids = [request.id for request in requests]
        text = "".join(ids)
        letters, lengths = b"", b""
        if text:
            letters, lengths = text.encode(errors="replace"), pack(f"<{len(ids)}I", *map(len, ids))
        meta = [_REQUESTS.pack(layout.number, len(letters), first_call), lengths, letters]
        return self._message(Kind.ALIKE_REQUESTS, layout, meta, [request.inputs for request in requests])

    def done(self, layout: Layout, first_call: int, times: Times, outputs: Sequence[Mapping[str, Tensor]]) -> bytes:
        """One message, or two, of the last answers to a whole batch. At most `MOST_ALIKE`."""
        if len(outputs) == 1 and layout.lone_done and self._described[layout.number] is layout:
            return layout.lone_done + _LONE_DONE.pack(first_call, *times) + _joined(layout, outputs[0])
        meta = [_DONE.pack(layout.number, first_call, *times)]
        return self._message(Kind.ALIKE_DONE, layout, meta, outputs)

    def _message(
        self, kind: Kind, layout: Layout, meta: Sequence[bytes], tensors: Collection[Mapping[str, Any]]
    ) -> bytes:
        data: list[Buffer] = []
        size = 0
        for name, _, _, nbytes in layout.columns:
            data += [each[name].tobytes() for each in tensors]
            rest = -nbytes * len(tensors) % 8
            if rest:
                data.append(PADDING[rest])
            size += nbytes * len(tensors) + rest
        message = data_frame(kind, len(tensors), meta, data, size)
        if self._described[layout.number] is layout:
            return message
        self._described[layout.number] = layout
        return _description(layout) + message


def _joined(layout: Layout, tensors: Mapping[str, Any]) -> bytes:
    names = layout.names
    if len(names) == 1:
        return tensors[names[0]].tobytes()  # type: ignore[no-any-return]
    return b"".join([tensors[name].tobytes() for name in names])


def _columns(tensors: Mapping[str, Any]) -> list[Column] | None:
    """None for tensors that are large enough for an arena, and for those of which many in a row are no array."""
    found = []
    for name, tensor in tensors.items():
        datatype = dtypes.BY_NUMPY.get(tensor.dtype)
        if datatype is None or datatype is dtypes.BYTES or not tensor.shape or not tensor.size:
            return None
        found.append(Column(name, datatype, tensor.shape, tensor.nbytes))
    return found if found and sum(column.nbytes for column in found) < INLINE else None


def _description(layout: Layout) -> bytes:
    columns = [(name, datatype.name, shape) for name, datatype, shape, _ in layout.columns]
    fields = ("number", "model_name", "model_version", "outputs", "rows", "callers")
    return json_frame(Kind.LAYOUT, {name: getattr(layout, name) for name in fields} | {"columns": columns})


# ---------------------------------------------------------------------- the side that hears


class LayoutReader:
    """The layouts of what the peer sends."""

    def __init__(self) -> None:
        self._layouts: dict[int, Layout] = {}

    def hear(self, message: Frame) -> int:
        """Take LAYOUT; returns its number. Raises `ProtocolError`."""
        found = read_json(message)
        try:
            number = int(found["number"])
            columns = [_column(*each) for each in found["columns"]]
            names = found["model_name"], found["model_version"], *found["outputs"], *found["callers"]
            rows, callers = int(found["rows"]), found["callers"]
        except _NONSENSE as error:
            raise ProtocolError(f"a layout: {type(error).__name__}: {error}") from error
        if not 0 <= number < MOST_LAYOUTS or not columns or not all(isinstance(name, str) for name in names):
            raise ProtocolError(f"a layout {number} of {len(columns)} tensors for {names}")
        self._layouts[number] = Layout(number, names[0], names[1], found["outputs"], columns, rows, callers)
        return number

    def requests(self, message: Frame) -> AlikeRequests:
        """The requests of ALIKE_REQUESTS. Raises `ProtocolError`."""
        body, count = message.body, message.number
        ids: list[str] = []
        try:
            number, letters, first_call = _REQUESTS.unpack_from(body, HEADER_BYTES)
            layout = self._layouts[number]
            if letters:
                begin = HEADER_BYTES + _REQUESTS.size
                lengths = unpack_from(f"<{count}I", body, begin)
                begin += 4 * count
                text, end = str(body[begin : begin + letters], "utf-8"), 0
                for length in lengths:
                    ids.append(text[end : end + length])
                    end += length
                if end != len(text):
                    raise ProtocolError(f"ids of {len(text)} characters, not {end}")
            return AlikeRequests(layout, first_call, ids, _rows(layout, message))
        except _NONSENSE as error:
            raise ProtocolError(f"requests: {type(error).__name__}: {error}") from error

    def done(self, message: Frame) -> AlikeDone:
        """The answers of ALIKE_DONE. Raises `ProtocolError`."""
        try:
            number, first_call, *times = _DONE.unpack_from(message.body, HEADER_BYTES)
            layout = self._layouts[number]
            return AlikeDone(layout, first_call, tuple(times), _rows(layout, message))
        except _NONSENSE as error:
            raise ProtocolError(f"answers: {type(error).__name__}: {error}") from error


def _column(name: Any, datatype: Any, shape: Iterable[Any]) -> Column:
    kind, dims = dtypes.BY_NAME[datatype], tuple(shape)
    if (
        not isinstance(name, str)
        or not kind.itemsize
        or not dims
        or any(type(dim) is not int or dim < 1 for dim in dims)
    ):
        raise ValueError(f"a tensor '{name}' {datatype}{list(dims)}")
    return Column(name, kind, dims, prod(dims) * kind.itemsize)


def _rows(layout: Layout, message: Frame) -> list[Tensors]:
    """The tensors of each, as views of the message. Raises `TypeError` where they run past it."""
    count, position = message.number, message.data
    if count == 1:
        body, row = message.body, {}
        for name, datatype, shape, nbytes in layout.columns:
            row[name] = np.ndarray(shape, datatype.numpy, body, position)
            position += nbytes + -nbytes % 8
        return [row]
    columns = []
    for _, datatype, shape, nbytes in layout.columns:
        columns.append(np.ndarray((count, *shape), datatype.numpy, message.body, position))
        position += nbytes * count + -nbytes * count % 8
    names = layout.names
    if len(columns) == 1:
        name = names[0]
        return [{name: tensor} for tensor in columns[0]]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
