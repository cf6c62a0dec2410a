"""Messages of many requests, or answers, that differ only in their ids and in the bytes of their tensors.

Their common parts are a `Layout`. The sender describes it once, under a number (`Kind.LAYOUT`). A message of requests
or final answers of that layout has, in front of their tensors::

    requests    layout u32 | bytes of the ids u32 | call of the first u64 | characters of each id u32[n] | the ids
    done        layout u32 | spare u32 | call of the first u64 | times u64[4]
    tensors     those of the first name, one after the other, then, at a multiple of 8 bytes, those of the second

The calls of requests and of a finished batch are consecutive numbers. If no request has an id, the lengths of the ids
are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from math import prod
from struct import Struct, pack, unpack_from
from struct import error as StructError  # noqa: N812
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from headrace.messages import dtypes
from headrace.messages.dtypes import DataType
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import Tensor
from headrace_processes.ipc.framing import HEADER_BYTES, PADDING, Buffer, Frame, Kind, ProtocolError, data_frame, head
from headrace_processes.ipc.json_parts import json_frame, read_json
from headrace_processes.ipc.replies import Times
from headrace_processes.ipc.tensors import INLINE

#: The most keys that a sender stores, including those used once. Clients choose shapes, so there may be many.
MAX_LAYOUTS: Final = 1024
#: The most requests or answers in one message.
MAX_ALIKE: Final = 4096

_REQUESTS = Struct("<IIQ")
_DONE = Struct("<IxxxxQQQQQ")
#: The fields that follow the fixed start of a message with one request, or with the answer of a batch of one.
_LONE_REQUEST, _LONE_DONE = Struct("<Qxxxx"), Struct("<QQQQQxxxx")
#: The length of an id, in characters.
_LENGTH = Struct("<I")
_NONSENSE: Final = (StructError, ValueError, LookupError, TypeError, OverflowError)

#: The tensors of one request or answer.
Tensors: TypeAlias = "dict[str, np.ndarray[Any, Any]]"


class Column(NamedTuple):
    """One tensor that every request or answer of a layout has. ``shape`` and ``nbytes`` are those of one of them."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    nbytes: int


class Layout:
    """The common parts of requests to a model, or of its answers: everything but ids and tensor bytes.

    ``outputs`` are the requested outputs; empty for answers. ``rows`` and ``callers`` are set only for requests that an
    instance executes. Compared and hashed by identity.
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
        #: The fixed start of a message with one request, and of one with the answer of a batch of one; empty if the
        #: tensors need padding.
        self.lone_request = self._lone(Kind.ALIKE_REQUESTS, _REQUESTS.size)
        self.lone_done = self._lone(Kind.ALIKE_DONE, _DONE.size)

    def _lone(self, kind: Kind, meta_bytes: int) -> bytes:
        if any(column.nbytes % 8 for column in self.columns):
            return b""
        begin = -(-(HEADER_BYTES + meta_bytes) // 8) * 8
        return head(kind, 1, begin, begin + sum(column.nbytes for column in self.columns)) + pack("<Ixxxx", self.number)


class AlikeRequests(NamedTuple):
    """Requests of one layout, as received. ``ids`` is empty if no request has an id."""

    layout: Layout
    first_call: int
    ids: Sequence[str]
    inputs: Sequence[Tensors]


class AlikeDone(NamedTuple):
    """The final answers of a whole batch, as received. Their calls are consecutive, from ``first_call`` on."""

    layout: Layout
    first_call: int
    times: Times
    outputs: Sequence[Tensors]


def request_key(request: InferRequest) -> Hashable:
    """Return the key of the layout of ``request`` to one model; None if it cannot have a layout.

    ``request`` must have passed `Signature.check`, unless the key only looks up a layout of requests that have passed.
    """
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
    """Return the key of the layout of ``response``, which includes its model; None if it cannot have a layout."""
    outputs = response.outputs
    if len(outputs) == 1:
        ((name, tensor),) = outputs.items()
        if type(tensor) is not np.ndarray:
            return None
        return response.model_name, response.model_version, name, tensor.shape, tensor.dtype
    tensors = _tensors_key(outputs)
    return tensors and (response.model_name, response.model_version, tensors)


def _tensors_key(tensors: Mapping[str, Any]) -> tuple[Hashable, ...] | None:
    key: list[Hashable] = []
    for name, tensor in tensors.items():
        if type(tensor) is not np.ndarray:
            return None
        key += (name, tensor.shape, tensor.dtype)
    return tuple(key)


def is_plain(request: InferRequest) -> bool:
    """True if ``request`` has no parameters, sequence, priority, timeout or deadline: a layout and an id describe
    it."""
    return not (
        request.parameters
        or request.sequence_id
        or request.sequence_start
        or request.sequence_end
        or request.priority
        or request.timeout_us
        or request.has_terms
    )


# ---------------------------------------------------------------------- the side that sends


class LayoutWriter:
    """The layouts of one sender. One thread at a time."""

    def __init__(self) -> None:
        #: The layouts by key; None for a key that was used once, or cannot have a layout. If a key is missing or None,
        #: call `layout_for_key`.
        self.known: dict[Hashable, Layout | None] = {}
        self._count = 0
        #: The layout that was sent to the peer under each number.
        self._described: list[Layout | None] = [None] * MAX_LAYOUTS

    def layout_for_key(
        self,
        key: Hashable,
        model_name: str,
        model_version: str,
        outputs: Sequence[str],
        tensors: Mapping[str, Any],
        rows: int = 0,
        callers: Sequence[str] = (),
    ) -> Layout | None:
        """Return the layout for ``key``, created when the key is used for the second time. Return None the first time,
        and for tensors that cannot have one. A layout that is used only once would cost more than it saves."""
        known = self.known
        if key not in known:
            if len(known) >= MAX_LAYOUTS:
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
        """Return the layout of a final answer. None unless it is a response without parameters and its key is known."""
        if type(answer) is not InferResponse or answer.parameters:
            return None
        key = answer_key(answer)
        if key is None:
            return None
        layout = self.known.get(key)
        if layout is None:
            layout = self.layout_for_key(key, answer.model_name, answer.model_version, (), answer.outputs)
        return layout

    def forget(self) -> None:
        """Remove all layouts and number them from 0 again. Layouts returned before can still be used."""
        self.known.clear()
        self._count = 0

    def requests(self, layout: Layout, first_call: int, requests: Sequence[InferRequest]) -> bytes:
        """Return the message of requests of ``layout``, at most `MAX_ALIKE`; the first has the number ``first_call``,
        the next ones follow. If the peer does not have the layout, its description precedes it."""
        if len(requests) == 1 and layout.lone_request and self._described[layout.number] is layout:
            (request,) = requests
            data = _joined(layout, request.inputs)
            if not request.id:
                return layout.lone_request + _LONE_REQUEST.pack(first_call) + data
            letters = request.id.encode(errors="replace")
            start = _REQUESTS.pack(layout.number, len(letters), first_call)
            return data_frame(
                Kind.ALIKE_REQUESTS, 1, (start, _LENGTH.pack(len(request.id)), letters), (data,), len(data)
            )
        ids = [request.id for request in requests]
        text = "".join(ids)
        letters = lengths = b""
        if text:
            letters, lengths = text.encode(errors="replace"), pack(f"<{len(ids)}I", *map(len, ids))
        meta = [_REQUESTS.pack(layout.number, len(letters), first_call), lengths, letters]
        return self._message(Kind.ALIKE_REQUESTS, layout, meta, [request.inputs for request in requests])

    def done(self, layout: Layout, first_call: int, times: Times, outputs: Sequence[Mapping[str, Tensor]]) -> bytes:
        """Return the message of the final answers of a whole batch, at most `MAX_ALIKE`. If the peer does not have
        the layout, its description precedes it."""
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
    """Return a column for each tensor. None if together they are large enough for the arena, or if one has strings, no
    axis, no element or a dtype that the protocol lacks."""
    columns = []
    for name, tensor in tensors.items():
        datatype = dtypes.BY_NUMPY.get(tensor.dtype)
        if datatype is None or datatype is dtypes.BYTES or not tensor.shape or not tensor.size:
            return None
        columns.append(Column(name, datatype, tensor.shape, tensor.nbytes))
    return columns if columns and sum(column.nbytes for column in columns) < INLINE else None


def _description(layout: Layout) -> bytes:
    columns = [(name, datatype.name, shape) for name, datatype, shape, _ in layout.columns]
    fields = ("number", "model_name", "model_version", "outputs", "rows", "callers")
    return json_frame(Kind.LAYOUT, {name: getattr(layout, name) for name in fields} | {"columns": columns})


# ---------------------------------------------------------------------- the side that receives


class LayoutReader:
    """The layouts that the peer has described, and the messages that use them."""

    def __init__(self) -> None:
        self._layouts: dict[int, Layout] = {}

    def receive(self, message: Frame) -> int:
        """Store the layout of a LAYOUT and return its number. Raises `ProtocolError`."""
        content = read_json(message)
        try:
            number = int(content["number"])
            columns = [_column(*each) for each in content["columns"]]
            names = content["model_name"], content["model_version"], *content["outputs"], *content["callers"]
            rows, callers = int(content["rows"]), content["callers"]
        except _NONSENSE as error:
            raise ProtocolError(f"a layout: {type(error).__name__}: {error}") from error
        if not 0 <= number < MAX_LAYOUTS or not columns or not all(isinstance(name, str) for name in names):
            raise ProtocolError(f"a layout {number} of {len(columns)} tensors for {names}")
        self._layouts[number] = Layout(number, names[0], names[1], content["outputs"], columns, rows, callers)
        return number

    def requests(self, message: Frame) -> AlikeRequests:
        """Return the requests of an ALIKE_REQUESTS. Raises `ProtocolError`."""
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
        """Return the answers of an ALIKE_DONE. Raises `ProtocolError`."""
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
    """Return the tensors of each request or answer, as views of the message. Raises `TypeError` if they run past its
    end."""
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
