"""Frames as bytes. The oracle is hyperframe, which parses and writes the frames of RFC 9113."""

from __future__ import annotations

import pytest
from hyperframe import frame as oracle
from hypothesis import given
from hypothesis import strategies as st

from headrace_grpc.http2 import frames

_IDS = st.integers(1, frames.LAST_ID)
_NUMBERS = st.integers(0, 2**32 - 1)


def parsed(data: bytes) -> oracle.Frame:
    found, size = oracle.Frame.parse_frame_header(memoryview(data)[: frames.HEAD_BYTES])
    assert size == len(data) - frames.HEAD_BYTES
    found.parse_body(memoryview(data)[frames.HEAD_BYTES :])
    return found


@given(_IDS, st.binary(max_size=70_000))
def test_a_frame_has_its_size_kind_flags_and_stream(stream: int, payload: bytes) -> None:
    found = parsed(frames.frame(frames.DATA, frames.END_STREAM, stream, payload))
    assert isinstance(found, oracle.DataFrame)
    assert (found.stream_id, set(found.flags), found.data) == (stream, {"END_STREAM"}, payload)


@given(st.dictionaries(st.integers(1, 6), _NUMBERS))
def test_settings_are_written_and_read(values: dict[int, int]) -> None:
    data = frames.settings(values.items())
    found = parsed(data)
    assert isinstance(found, oracle.SettingsFrame)
    assert found.settings == values
    assert dict(frames.read_settings(oracle.SettingsFrame(0, values).serialize_body())) == values


@given(_IDS, st.integers(0, 13))
def test_a_reset_names_the_stream_and_the_reason(stream: int, code: int) -> None:
    found = parsed(frames.reset(stream, code))
    assert isinstance(found, oracle.RstStreamFrame)
    assert (found.stream_id, found.error_code) == (stream, code)


@given(st.just(0) | _IDS, st.integers(1, frames.MAX_WINDOW))
def test_a_window_update_names_the_stream_and_the_increment(stream: int, increment: int) -> None:
    found = parsed(frames.window_update(stream, increment))
    assert isinstance(found, oracle.WindowUpdateFrame)
    assert (found.stream_id, found.window_increment) == (stream, increment)


@given(_IDS, st.integers(0, 13), st.text(max_size=50))
def test_a_goaway_names_the_last_stream_and_the_reason(last: int, code: int, reason: str) -> None:
    found = parsed(frames.goaway(last, code, reason))
    assert isinstance(found, oracle.GoAwayFrame)
    assert (found.last_stream_id, found.error_code, found.additional_data) == (last, code, reason.encode())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (frames.DATA, "DataFrame"),
        (frames.HEADERS, "HeadersFrame"),
        (frames.PRIORITY, "PriorityFrame"),
        (frames.RST_STREAM, "RstStreamFrame"),
        (frames.SETTINGS, "SettingsFrame"),
        (frames.PUSH_PROMISE, "PushPromiseFrame"),
        (frames.PING, "PingFrame"),
        (frames.GOAWAY, "GoAwayFrame"),
        (frames.WINDOW_UPDATE, "WindowUpdateFrame"),
        (frames.CONTINUATION, "ContinuationFrame"),
    ],
)
def test_the_kinds_have_the_numbers_of_the_standard(kind: int, name: str) -> None:
    assert getattr(oracle, name).type == kind


def test_the_settings_have_the_numbers_of_the_standard() -> None:
    standard = oracle.SettingsFrame
    assert standard.ENABLE_PUSH == frames.ENABLE_PUSH
    assert standard.MAX_CONCURRENT_STREAMS == frames.MAX_CONCURRENT_STREAMS
    assert standard.INITIAL_WINDOW_SIZE == frames.INITIAL_WINDOW_SIZE
    assert standard.MAX_FRAME_SIZE == frames.MAX_FRAME_SIZE
    assert standard.MAX_HEADER_LIST_SIZE == frames.MAX_HEADER_LIST_SIZE
