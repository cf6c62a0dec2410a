"""The meaning of header blocks. The oracles are ``hpack``, and one reading of all fields at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.engine import Operation
from headrace_grpc import call_headers
from headrace_grpc.call_headers import CallHead, Refusal, extended, read_call
from headrace_grpc.http2.field_decoder import Fields
from headrace_grpc.http2.headers import HeaderReader, MalformedHeaders, RequestHeaders
from headrace_grpc.http2.limits import Limits
from headrace_grpc.message_framing import Compressor
from headrace_grpc.rpc import Metadata, Rpc, only

PATH = b"/x/Infer"
TABLE = {PATH: Rpc("x", "Infer", Operation.INFER, bytes)}
START = [
    *((b":method", b"POST"), (b":scheme", b"http"), (b":path", PATH), (b":authority", b"h")),
    *((b"te", b"trailers"), (b"content-type", b"application/grpc"), (b"user-agent", b"t")),
]
#: By the text to show if a test fails.
OWN = {
    "an id": (b"x-request-id", b"1"),
    "another id": (b"x-request-id", b"2"),
    "a timeout": (b"grpc-timeout", b"5S"),
    "no timeout": (b"grpc-timeout", b"soon"),
    "gzip": (b"grpc-encoding", b"gzip"),
    "an unknown encoding": (b"grpc-encoding", b"odd"),
    "no gRPC": (b"content-type", b"text/plain"),
    "bytes": (b"a-bin", b"AA"),
    "a pseudo-header": (b":authority", b"late"),
    "a capital": (b"Upper", b"x"),
    "not trailers": (b"te", b"gzip"),
    "a line break": (b"v", b"a\nb"),
    "HTTP/1": (b"connection", b"close"),
    "long": (b"long", b"v" * 900),
    # Two of them are more than is answered, and four are just not more than ends the connection.
    "too long": (b"longer", b"w" * 8000),
}
CALLS = st.lists(
    st.tuples(st.integers(0, len(START)), st.lists(st.tuples(st.sampled_from([*OWN]), st.booleans()), max_size=4)),
    max_size=8,
)


def interpret(headers: RequestHeaders) -> CallHead | Refusal:
    return read_call(TABLE, Compressor("none"), headers)


def extend(meaning: CallHead | Refusal, fields: Fields) -> CallHead | None:
    return None if isinstance(meaning, Refusal) else extended(meaning, fields)


def reader(extends: bool) -> HeaderReader[Any]:
    return HeaderReader(interpret, extend if extends else lambda *_: None, Limits(), lambda _: None)


def ours(headers: HeaderReader[Any], block: bytes) -> Any:
    try:
        found = headers.read(block)
    except MalformedHeaders:
        return "malformed"
    if isinstance(found, Refusal):
        return found
    for _ in range(2):  # as found, then as remembered
        values = [found.only(name) for name in (b"x-request-id", b"a-bin", b"x-missing")]
    return found.rpc, found.metadata, found.timeout, found.encoding, found.answers, values


@settings(max_examples=300, deadline=None)
@given(CALLS)
@example([(0, [("too long", False)] * 4)])
def test_a_call_means_the_same_in_pieces_and_whole(calls: Sequence[Any]) -> None:
    """One connection; a call may omit the last of the usual fields, and add others."""
    encoder, in_pieces, table = hpack.Encoder(), reader(extends=True), hpack.Decoder(65536)
    for left_out, own in calls:
        fields = START[: len(START) - left_out % 3]
        block = encoder.encode(fields)
        for label, is_indexed in own:
            field = OWN[label]
            block += encoder.encode([field if is_indexed else hpack.NeverIndexedHeaderTuple(*field)])
        whole: list[Any] = [tuple(field) for field in table.decode(block, raw=True)]
        assert ours(in_pieces, block) == ours(reader(extends=False), hpack.Encoder().encode(whole))


def test_the_only_value_of_a_name_is_found_once_for_a_front(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[bytes] = []

    def search(metadata: Metadata, name: bytes) -> str | None:
        searched.append(name)
        return only(metadata, name)

    monkeypatch.setattr(call_headers, "only", search)
    headers, encoder, key = reader(extends=True), hpack.Encoder(), (b"authorization", b"Bearer k")
    headers.read(encoder.encode([*START, key]))
    front, found = encoder.encode([*START, key]), []
    for more in [(b"x-request-id", b"1")], [(b"x-request-id", b"2")], [(b"authorization", b"other")], []:
        block = front + encoder.encode([hpack.NeverIndexedHeaderTuple(*field) for field in more])
        found.append(headers.read(block).only(b"authorization"))
    assert found == ["Bearer k", "Bearer k", "", "Bearer k"]
    assert searched == [b"authorization"] * 3  # of the first call with this front, of the front, of one with two
    assert only((("k-bin", b"1"), ("a", "1")), b"k-bin") == ""
    assert only((("k-bin", b"1"), ("a", "1")), b"a") == "1"
    assert only((("a", "1"), ("a", "1")), b"a") == ""
    assert only((("a", "1"),), b"b") is None


def test_a_front_is_interpreted_once() -> None:
    seen: list[RequestHeaders] = []

    def count(headers: RequestHeaders) -> CallHead | Refusal:
        seen.append(headers)
        return interpret(headers)

    headers: HeaderReader[Any] = HeaderReader(count, extend, Limits(), lambda _: None)
    encoder = hpack.Encoder()
    headers.read(encoder.encode(START))
    for number in range(5):
        # An indexed field moves all others; grpc's C core sends metadata unindexed, its Go and Java versions indexed.
        block = encoder.encode(START) + encoder.encode([(b"x-request-id", b"%d" % number)])
        assert headers.read(block).metadata[-1] == ("x-request-id", str(number))
    assert len(seen) == 3  # the first call, and the front of the second with it and alone


@pytest.mark.parametrize("count", [101, 300])
def test_many_fields_count_as_a_waste_of_time_once(count: int) -> None:
    idle: list[int] = []
    headers: HeaderReader[Any] = HeaderReader(interpret, extend, Limits(), idle.append)
    encoder = hpack.Encoder()
    for extra in ([], [], [(b"a", b"b")] * (count - len(START))):
        headers.read(encoder.encode([*START, *extra]))
    assert idle == [count]


def test_an_authority_behind_the_front_is_one_of_the_pseudo_headers() -> None:
    headers, encoder = reader(extends=True), hpack.Encoder()
    pseudo, regular = START[:3], START[4:]
    for _ in range(3):
        block = encoder.encode(pseudo) + b"\x01\x01h" + encoder.encode(regular)
        assert isinstance(headers.read(block), CallHead)


def test_a_front_counts_for_the_size_of_all_fields() -> None:
    headers, encoder = reader(extends=True), hpack.Encoder()
    for size in (1, 1, Limits().header_list_bytes - 40):  # too many with the front only
        found = headers.read(encoder.encode(START) + encoder.encode([hpack.NeverIndexedHeaderTuple(b"a", b"v" * size)]))
        assert isinstance(found, Refusal if size > 1 else CallHead)
