"""The messages between two processes: decoding returns the encoded values, and malformed messages are refused."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Sequence
from struct import Struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import Code, HeadraceError, Rescheduled
from headrace.messages import dtypes
from headrace.messages.caller import Caller
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor, Tensor, wire_view
from headrace.messages.ticket import Ticket
from headrace_processes.ipc import json_parts
from headrace_processes.ipc.arena import Arena, Reader, Writer
from headrace_processes.ipc.codec import Decoder, Encoder, ReceivedRequest, read_times
from headrace_processes.ipc.framing import (
    FIRST_OWN_KIND,
    Frame,
    FrameParser,
    Kind,
    ProtocolError,
    frame,
    integers_frame,
    read_integers,
)
from headrace_processes.ipc.replies import AnswerStatus, Reply
from headrace_processes.ipc.tensors import INLINE
from tests.core.conftest import make_ticket

QUICK = settings(max_examples=60, deadline=None)
HEADER = Struct("<IBxHI")
REQUEST = Struct("<QQQQIHHIIII")  # call, caller, timeout, priority, rows, flags, inputs, four sizes of texts
TIMES = (1, 2, 3, 4)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
NAMES = TEXT.filter(lambda name: "\0" not in name)
SCALARS = st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), TEXT)
PARAMETERS = st.dictionaries(TEXT, SCALARS, max_size=4)
SHAPES = st.lists(st.integers(0, 3), max_size=8).map(tuple).filter(lambda shape: np.prod(shape, dtype=int) <= 36)


class Places:
    """The writer of an arena and its reader, in one process."""

    def __init__(self, size: int) -> None:
        self.arena = Arena.create(size)
        self.writer, self.reader = Writer(self.arena), Reader(self.arena)

    def free(self, offset: int) -> None:
        self.writer.release(offset)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    datatype = draw(st.sampled_from(dtypes.ALL))
    shape = draw(SHAPES)
    count = int(np.prod(shape, dtype=int))
    if datatype is dtypes.BYTES:
        return BytesTensor.from_items(draw(st.lists(st.binary(max_size=9), min_size=count, max_size=count)), shape)
    seed = draw(st.integers(0, 2**32 - 1))
    content = np.random.default_rng(seed).bytes(count * datatype.itemsize)
    if datatype is dtypes.BOOL:
        content = bytes(byte & 1 for byte in content)
    return np.frombuffer(content, datatype.numpy).reshape(shape)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    ticket = make_ticket(
        draw(NAMES),
        draw(st.dictionaries(NAMES, tensors(), max_size=4)),
        ignore,
        draw(st.lists(NAMES.filter(bool), max_size=3).map(tuple)),
        draw(TEXT),
        parameters=draw(PARAMETERS),
        priority=draw(st.integers(0, 2**64 - 1)),
        timeout_us=draw(st.integers(0, 2**64 - 1)),
        sequence_id=draw(st.integers(0, 2**64 - 1) | TEXT.filter(bool)),
        sequence_start=draw(st.booleans()),
        sequence_end=draw(st.booleans()),
        callers=draw(st.lists(NAMES, max_size=3).map(tuple)),
        rows=draw(st.integers(0, 2**32 - 1)),
    )
    ticket.pinned = draw(st.booleans())
    return ticket


@st.composite
def replies(draw: st.DrawFn) -> Reply:
    call, status = draw(st.integers(0, 2**64 - 1)), draw(st.sampled_from(AnswerStatus))
    answer: InferResponse | HeadraceError | None = None
    if status is AnswerStatus.RESPONSE:
        answer = InferResponse(draw(st.dictionaries(NAMES, tensors(), max_size=3)), draw(PARAMETERS))
    elif status is AnswerStatus.ERROR:
        answer = HeadraceError(draw(TEXT), draw(st.sampled_from(Code)))
    elif status is AnswerStatus.RESCHEDULED:
        answer = Rescheduled()
    return Reply(call, status, draw(st.booleans()), answer)


def ignore(*arguments: object) -> None: ...


def only(message: bytes, writable: bool = False) -> Frame:
    (frame,) = FrameParser(writable).feed(message)
    return frame


def decoder(places: Places | None = None) -> Decoder:
    return Decoder(places.reader, places.free) if places else Decoder(None, ignore)


def assert_same_tensors(actual: Any, expected: Any) -> None:
    assert list(actual) == list(expected)
    for name, tensor in expected.items():
        other = actual[name]
        assert (type(other), other.shape) == (type(tensor), tensor.shape)
        if isinstance(tensor, BytesTensor):
            assert other.items() == tensor.items()
        else:
            assert other.dtype == tensor.dtype
            assert other.tobytes() == tensor.tobytes()


def assert_same_request(decoded: ReceivedRequest, sent: Ticket) -> None:
    expected = sent.request
    assert (decoded.rows, decoded.pinned) == (sent.rows, sent.pinned)
    for field in ("id", "outputs", "parameters", "priority", "timeout_us", "sequence_id", "callers"):
        assert getattr(decoded, field) == getattr(expected, field), field
    assert [type(value) for value in decoded.parameters.values()] == [type(v) for v in expected.parameters.values()]
    assert (decoded.sequence_start, decoded.sequence_end) == (expected.sequence_start, expected.sequence_end)
    assert_same_tensors(decoded.inputs, expected.inputs)


def assert_same_reply(decoded: Reply, expected: Reply) -> None:
    assert decoded[:3] == expected[:3]
    if isinstance(expected.answer, InferResponse):
        assert isinstance(decoded.answer, InferResponse)
        assert decoded.answer.parameters == expected.answer.parameters
        assert_same_tensors(decoded.answer.outputs, expected.answer.outputs)
    elif expected.answer is not None:
        assert isinstance(decoded.answer, HeadraceError)
        assert isinstance(decoded.answer, Rescheduled) is isinstance(expected.answer, Rescheduled)
        for field in ("message", "code"):
            assert getattr(decoded.answer, field) == getattr(expected.answer, field)
    else:
        assert decoded.answer is None


def cut(stream: bytes, places: Sequence[int]) -> list[bytes]:
    """Return ``stream`` in pieces that end at ``places``."""
    ends = sorted({min(place, len(stream)) for place in places} | {len(stream)})
    return [stream[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


# ---------------------------------------------------------------------- there and back


@QUICK
@given(st.lists(tickets(), max_size=4), st.booleans())
def test_requests_are_read_as_they_were_written(batch: list[Ticket], writable: bool) -> None:
    message = Encoder(None).requests(list(enumerate(batch, 2**63)))
    decoded = decoder().requests(only(message, writable))
    assert [request.call for request in decoded] == [2**63 + index for index in range(len(batch))]
    for request, expected in zip(decoded, batch, strict=True):
        assert_same_request(request, expected)


@QUICK
@given(st.lists(replies(), max_size=4), st.sampled_from([Kind.DONE, Kind.ANSWERS]))
def test_answers_are_read_as_they_were_written(sent: list[Reply], kind: Kind) -> None:
    message = only(Encoder(None).answers(sent, TIMES if kind == Kind.DONE else None))
    assert message.kind == kind
    for decoded, expected in zip(decoder().answers(message), sent, strict=True):
        assert_same_reply(decoded, expected)
    if kind == Kind.DONE:
        assert read_times(message) == TIMES


@QUICK
@given(st.lists(tickets(), min_size=1, max_size=3), st.lists(st.integers(0, 3000), max_size=9), st.booleans())
def test_frames_survive_any_cut(batch: list[Ticket], places: list[int], writable: bool) -> None:
    encoder, frames, reader = Encoder(None), FrameParser(writable), decoder()
    stream = b"".join(encoder.requests([(0, ticket)]) for ticket in batch)
    decoded = [reader.requests(each) for piece in cut(stream, places) for each in frames.feed(piece)]
    for (request,), expected in zip(decoded, batch, strict=True):
        assert_same_request(request, expected)


def test_a_frame_may_arrive_byte_by_byte_and_be_larger_than_a_read() -> None:
    array = np.arange(40_000, dtype=np.uint8)  # more than 32 KiB: inside, because there is no arena
    small = Encoder(None).requests([(1, make_ticket("m", {"x": array[:9]}, ignore))])
    large = Encoder(None).requests([(1, make_ticket("m", {"x": np.tile(array, 9)}, ignore))])
    frames = FrameParser()
    parsed = [each for byte in small for each in frames.feed(bytes([byte]))]
    parsed += [each for piece in cut(large + small, range(0, len(large), 65536)) for each in frames.feed(piece)]
    sizes = [decoder().requests(each)[0].inputs["x"].shape for each in parsed]
    assert sizes == [(9,), (360_000,), (9,)]


@pytest.mark.parametrize("size", [0, 1, 100_000])
def test_an_id_of_any_length_travels(size: int) -> None:
    message = Encoder(None).requests([(1, make_ticket("m", {}, ignore, id="é" * size))])
    assert decoder().requests(only(message))[0].id == "é" * size


@pytest.mark.parametrize("writable", [False, True])
def test_arrays_are_aligned_after_any_data(writable: bool) -> None:
    """As Triton's arrays are (docs/spec/behaviours.md section 9.2). A model may write to its own copy."""
    inputs: dict[str, Any] = {f"{'n' * size}": np.arange(size, dtype=np.float64) for size in range(1, 9)}
    inputs |= {f"b{size}": np.arange(size, dtype=np.int8) for size in range(1, 9)}
    message = Encoder(None).requests([(1, make_ticket("m", inputs, ignore, id="odd"))])
    (request,) = decoder().requests(only(message, writable))
    for name, array in request.inputs.items():
        assert isinstance(array, np.ndarray)
        assert array.flags.aligned, name
        assert array.flags.writeable is writable


def test_a_request_to_another_model_has_its_name() -> None:
    request = InferRequest("other", {}, model_version="7", decoupled=True)
    (decoded,) = decoder().requests(only(Encoder(None).request(5, request)))
    assert (decoded.model_name, decoded.model_version, decoded.decoupled) == ("other", "7", True)


def test_messages_without_tensors() -> None:
    assert read_integers(only(integers_frame(Kind.RELEASE, [0, 2**64 - 1]))) == [0, 2**64 - 1]
    assert json_parts.read_json(only(json_parts.json_frame(Kind.NOTE, {"a": ["é", 1]}))) == {"a": ["é", 1]}
    assert only(frame(FIRST_OWN_KIND, 3))[:2] == (FIRST_OWN_KIND, 3)


# ---------------------------------------------------------------------- the arena


def array_of(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(nbytes).integers(0, 255, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", [INLINE - 1, INLINE, INLINE + 1, 1 << 20])
def test_large_tensors_travel_outside_the_message(nbytes: int) -> None:
    places, array = Places(4 << 20), array_of(nbytes)
    message = Encoder(places.writer).requests([(1, make_ticket("m", {"x": array}, ignore))])
    assert (len(message) > nbytes) is (nbytes < INLINE)
    (request,) = decoder(places).requests(only(message))
    assert np.array_equal(np.asarray(request.inputs["x"]), array)


def test_tensor_without_room_in_the_arena_is_sent_in_the_frame() -> None:
    places, arrays = Places(1 << 20), {str(n): array_of(400_000 + n) for n in range(4)}
    message = Encoder(places.writer).requests([(1, make_ticket("m", dict(arrays), ignore))])
    assert 800_000 < len(message) < 1_200_000
    (request,) = decoder(places).requests(only(message))
    assert_same_tensors(request.inputs, arrays)


def test_a_message_that_cannot_be_written_leaves_nothing_in_the_arena() -> None:
    places = Places(1 << 20)
    encoder = Encoder(places.writer)
    good = make_ticket("m", {"x": array_of(900_000)}, ignore)
    bad = make_ticket("m", {}, ignore, priority=-1)
    for _ in range(3):
        with pytest.raises(ValueError, match="argument"):
            encoder.requests([(1, good), (2, bad)])
    assert len(encoder.requests([(1, good)])) < 1000


def test_a_parameter_that_is_no_scalar_is_not_sent() -> None:
    odd: Any = object()
    reply = Reply(1, AnswerStatus.RESPONSE, True, InferResponse({}, {"a": odd}))
    with pytest.raises(ValueError, match="not JSON serializable"):
        Encoder(None).answers([reply])


# ---------------------------------------------------------------------- a hostile peer


def sample_requests() -> bytes:
    batch = [
        make_ticket("m", {"x": np.ones((2, 3), np.float32), "s": BytesTensor.from_items([b"a", b""], (2,))}, ignore),
        make_ticket("m", {"x": array_of(40_000)}, ignore, ("y",), "id", parameters={"p": 1.5}, callers=("a",)),
    ]
    return Encoder(Places(1 << 20).writer).requests(list(enumerate(batch)))


def sample_answers() -> bytes:
    sent = [
        Reply(1, AnswerStatus.RESPONSE, True, InferResponse({"y": np.ones((2, 3), np.int16)}, {"p": True})),
        Reply(2, AnswerStatus.ERROR, True, HeadraceError("no", Code.NOT_FOUND)),
        Reply(3, AnswerStatus.LATER, False, None),
        Reply(4, AnswerStatus.RESPONSE, True, InferResponse({"y": array_of(40_000)}, {})),
    ]
    return Encoder(Places(1 << 20).writer).answers(sent, TIMES)


def read_all(stream: bytes, places: Places | None = None) -> None:
    """Decode ``stream`` as each side does. The only error that it may raise is `ProtocolError`."""
    frozen = Decoder(places.reader, ignore) if places else decoder()
    for message in FrameParser().feed(stream):
        if message.kind == Kind.REQUESTS:
            frozen.requests(message)
        elif message.kind in (Kind.DONE, Kind.ANSWERS):
            frozen.answers(message)
            if message.kind == Kind.DONE:
                read_times(message)
        elif message.kind in (Kind.CANCEL, Kind.READ, Kind.RELEASE):
            read_integers(message)
        else:
            json_parts.read_json(message)


def is_refused(stream: bytes, places: Places | None = None) -> bool:
    try:
        read_all(stream, places)
    except ProtocolError:
        return True
    return False


@pytest.mark.parametrize("sample", [sample_requests, sample_answers])
@pytest.mark.parametrize("value", [0, 1, 0x7F, 0x80, 0xFF])
def test_no_byte_of_a_frame_can_break_its_reader(sample: Callable[[], bytes], value: int) -> None:
    message, places = sample(), Places(1 << 16)
    tracemalloc.start()
    try:
        for index in range(len(message)):
            is_refused(message[:index] + bytes([value]) + message[index + 1 :], places)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


@pytest.mark.parametrize("sample", [sample_requests, sample_answers])
def test_a_truncated_frame_is_incomplete_or_refused(sample: Callable[[], bytes]) -> None:
    message = sample()
    for size in range(len(message)):
        assert list(FrameParser().feed(message[:size])) == []
    for size in range(HEADER.size, len(message), 8):  # cut, and honest about it
        _, kind, count, data = HEADER.unpack_from(message)
        shorter = HEADER.pack(size, kind, count, min(data, size)) + message[HEADER.size : size]
        assert is_refused(shorter), size


@QUICK
@given(st.sampled_from(Kind), st.integers(0, 2**16 - 1), st.binary(max_size=300), st.integers(0, 300))
def test_random_bytes_are_read_or_refused(kind: Kind, count: int, body: bytes, data: int) -> None:
    body += bytes(-len(body) % 8)
    total = HEADER.size + len(body)
    is_refused(HEADER.pack(total, kind, count, min(HEADER.size + data, total)) + body, Places(1 << 12))


@QUICK
@given(st.binary(max_size=100))
def test_a_random_stream_is_read_or_refused(stream: bytes) -> None:
    is_refused(stream)


@pytest.mark.parametrize(
    ("total", "kind", "data"),
    [
        (0, Kind.REQUESTS, 16),
        (8, Kind.REQUESTS, 16),
        (17, Kind.REQUESTS, 16),
        (16, Kind.REQUESTS, 0),
        (16, Kind.REQUESTS, 24),
        (2**32 - 1, Kind.REQUESTS, 16),
        (2**32 - 8, 0, 16),
        (16, 255, 16),
    ],
)
def test_a_header_that_makes_no_sense_is_refused_at_once(total: int, kind: int, data: int) -> None:
    assert is_refused(HEADER.pack(total, kind, 0, data))


REQUEST = Struct("<QQQQIHHIIII")


def one_tensor(header: bytes, place: int, nbytes: int, offset: int, content: bytes = b"") -> bytes:
    """Return a request with one tensor of the given description."""
    meta = REQUEST.pack(1, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0)
    meta += Struct("<HBQQ").pack(len(header), place, nbytes, offset) + header
    meta += bytes(-(HEADER.size + len(meta)) % 8)
    begin = HEADER.size + len(meta)
    content += bytes(-len(content) % 8)
    return HEADER.pack(begin + len(content), Kind.REQUESTS, 1, begin) + meta + content


def header_of(datatype: dtypes.DataType, *shape: int) -> bytes:
    return Struct(f"<BB{len(shape)}q").pack(datatype.config_value, len(shape), *shape) + b"x"


def test_the_tensor_made_by_hand_is_what_an_encoder_writes() -> None:
    array = np.arange(4, dtype=np.int64)
    by_hand = one_tensor(header_of(dtypes.INT64, 4), 0, 32, 0, array.tobytes())
    assert by_hand == Encoder(None).requests([(1, make_ticket("", {"x": array}, ignore))])


BIG = 2**62


@pytest.mark.parametrize("place", [0, 1, 7])
@pytest.mark.parametrize("datatype", [dtypes.INT64, dtypes.BYTES, dtypes.BF16, dtypes.BOOL])
@pytest.mark.parametrize(
    ("shape", "nbytes", "offset"),
    [
        ((4,), 2**64 - 1, 0),
        ((4,), 32, 2**64 - 1),
        ((4,), 32, 2**63),
        ((4,), 32, 2**32 - 1),
        ((-1,), 2**64 - 8, 0),
        ((-1, -4), 32, 0),
        ((BIG, 4), 0, 0),
        ((BIG, BIG), 2**63, 0),
        ((BIG,), 2**63 + 1, 2**63),
        ((2**63 - 1,), 2**63 - 1, 1),
    ],
)
def test_no_description_of_a_tensor_reaches_outside(
    datatype: dtypes.DataType, shape: tuple[int, ...], nbytes: int, offset: int, place: int
) -> None:
    message = one_tensor(header_of(datatype, *shape), place, nbytes, offset, bytes(32))
    if datatype is dtypes.BYTES and nbytes == 0 and place == 0:
        assert decoder().requests(only(message))  # no valid strings: the reader finds them malformed
    else:
        assert is_refused(message, Places(1 << 16)) or (datatype is dtypes.BYTES and nbytes == 0)


@pytest.mark.parametrize("shape", [(0, BIG, BIG), (BIG, BIG, 0), (0,) * 64, (1,) * 64, (0,) * 255])
def test_shapes_without_elements_are_arrays_or_refused(shape: tuple[int, ...]) -> None:
    nbytes = 8 if 0 not in shape else 0
    is_refused(one_tensor(header_of(dtypes.INT64, *shape), 0, nbytes, 0, bytes(8)))


@pytest.mark.parametrize("header", [b"", b"\x01", b"\x01\xff", b"\x00\x00x", b"\xff\x00x", b"\x0b\x00\xff\xfe"])
def test_a_header_of_a_tensor_that_makes_no_sense_is_refused(header: bytes) -> None:
    assert is_refused(one_tensor(header, 0, 4, 0, bytes(8)))


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b"{",
        b"\xff",
        b"7",
        b"null",
        b"{}",
        b"[]",
        b"[{}]",
        b"[[], 0]",
        b'[{"a": {}}, 0]',
        b'[{"a": null}, 0]',
        b"[{}, [1]]",
        b"[{}, null]",
    ],
)
def test_settings_that_make_no_sense_are_refused(text: bytes) -> None:
    meta = REQUEST.pack(1, 0, 0, 0, 1, 0, 0, 0, 0, 0, len(text)) + text
    assert is_refused(frame(Kind.REQUESTS, 1, meta))
    answer = Struct("<QBBBxHII").pack(1, AnswerStatus.RESPONSE, 1, 0, 0, 0, len(text)) + text
    assert is_refused(frame(Kind.ANSWERS, 1, answer)) or text == b"{}"


@pytest.mark.parametrize("text", [b"[" * 200_000, b"{", b"\xff\xfe", b"", b"[]", b"7", b'"a"'])
def test_notes_that_make_no_sense_are_refused(text: bytes) -> None:
    assert is_refused(frame(Kind.NOTE, 0, text))


def test_a_code_or_a_status_that_does_not_exist_is_refused() -> None:
    answer = Struct("<QBBBxHII")
    for status, code in ((9, 0), (1, 200)):
        assert is_refused(frame(Kind.ANSWERS, 1, answer.pack(1, status, 1, code, 0, 0, 0)))
    assert not is_refused(frame(Kind.ANSWERS, 1, answer.pack(1, 1, 1, 0, 0, 0, 0)))


def test_caches_of_shapes_and_names_are_bounded() -> None:
    encoder, reader = Encoder(None), decoder()
    tracemalloc.start()
    try:
        for size in range(6_000):
            ticket = make_ticket("m", {"x": np.empty((0, size), np.int8)}, ignore, (f"o{size}",))
            reader.requests(only(encoder.requests([(1, ticket)])))
        traced_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert traced_bytes < 2 << 20


def test_wire_form_is_little_endian_and_row_major() -> None:
    array = np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3))
    message = Encoder(None).requests([(1, make_ticket("m", {"x": array}, ignore))])
    assert message.endswith(np.arange(6, dtype="<i4").tobytes())
    assert bytes(wire_view(array)) == np.arange(6, dtype="<i4").tobytes()


def test_the_sender_of_a_request_travels_to_the_process_of_a_model() -> None:
    trace = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
    caller = Caller("http", principal="alice", deadline_ns=7, trace_context=trace)
    request = InferRequest("m", {"x": np.zeros(2, np.float32)})
    request.send_as(caller)
    nested = InferRequest("m", {"x": np.zeros(2, np.float32)}, caller=request)  # a request that a model sends for it
    frame = only(Encoder(None).requests([(1, Ticket(request, ignore)), (2, Ticket(nested, ignore))]))
    for received in Decoder(None, ignore).requests(frame):
        sender = received.sender
        assert sender is not None
        assert (sender.transport, sender.principal, sender.deadline_ns, sender.trace_context) == (
            "http",
            "alice",
            7,
            trace,
        )


def test_the_sender_of_a_models_request_is_ignored() -> None:
    request = InferRequest("m", {"x": np.zeros(2, np.float32)})
    request.send_as(Caller("http", principal="root"))
    decoder = Decoder(None, ignore)
    (decoded,) = decoder.requests(only(Encoder(None).request(1, request)), {})
    assert decoded.sender is None
    (forged,) = decoder.requests(only(Encoder(None).requests([(1, Ticket(request, ignore))])), {})
    assert forged.sender is None
