"""What a frontend process is told is what the server was told, and a frame that is cut short is refused."""

from __future__ import annotations

from dataclasses import fields

import pytest

from headrace.config.options import Restriction, ServerOptions
from headrace.frontends.processes.schema import (
    FrontendKind,
    byte_headers,
    call_frame,
    read_call,
    read_options,
    text_headers,
    write_options,
)
from headrace.ipc.framing import Frame, FrameParser, ProtocolError

#: What a frontend never reads.
NOT_FRONTENDS = {"frontend_processes", "rate_limit_resource", "model_load_gpu_limit"}


def test_options_of_frontends_arrive_as_they_were() -> None:
    options = ServerOptions(
        id="a",
        model_repository=("/x", "/y"),
        http_address="::1",
        http_max_input_size=7,
        http_restricted_api={"inference": Restriction("k", "v")},
        grpc_restricted_protocol={"health": Restriction("triton-grpc-protocol-k", "é")},
        grpc_use_ssl=True,
        grpc_server_cert="/cert",
        log_verbose=1,
        frontend_processes=3,
    )
    arrived = read_options(write_options(options))
    assert arrived.frontend_processes == 0
    names = {field.name for field in fields(ServerOptions)} - NOT_FRONTENDS
    assert {name: getattr(arrived, name) for name in names} == {name: getattr(options, name) for name in names}


def frame_of(message: bytes) -> Frame:
    (found,) = FrameParser().feed(message)
    return found


@pytest.mark.parametrize("size", range(10))
def test_a_body_of_any_length_arrives(size: int) -> None:
    head, body = read_call(frame_of(call_frame(FrontendKind.CALL, {"id": 7}, (b"x" * size, b"y"))))
    assert (head["id"], bytes(body)) == (7, b"x" * size + b"y")


@pytest.mark.parametrize("meta", [b"", b"[]", b"{}", b'{"size": 9}', b'{"size": "a"}', b"{"])
def test_a_call_that_is_cut_short_is_refused(meta: bytes) -> None:
    message = call_frame(FrontendKind.CALL, {}, (b"12345678",))
    found = frame_of(message)
    begin = len(message) - 8
    with pytest.raises(ProtocolError):
        read_call(found._replace(body=message[:16] + meta.ljust(begin - 16, b"\0") + message[begin:]))


def test_headers_survive_as_json() -> None:
    headers = [(b"a", bytes(range(128, 256))), (b"a", b"")]
    assert byte_headers(text_headers(headers)) == headers
