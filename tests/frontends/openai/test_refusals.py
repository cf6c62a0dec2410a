"""What is refused before a route gets it is answered in OpenAI's form, on every host and port."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from typing import NamedTuple

import openai
import pytest

from headrace.config.option_parts import Restriction
from headrace_openai import OpenAiOptions
from headrace_testing.serving import port_of, serve
from tests.frontends.openai.model_files import write_models

LIMIT = 200_000


class Ports(NamedTuple):
    first: int
    own: int


@pytest.fixture(scope="module", params=["native", "hypercorn"])
def ports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    """A server that logs each request, as with ``--log-verbose=1``."""
    log = logging.getLogger("headrace")
    level = log.level
    log.setLevel(logging.DEBUG)
    options = {
        "http_server": request.param,
        "http_restricted_api": {"inference": Restriction("x-key", "secret")},
        "plugin_options": [OpenAiOptions(port=0, max_body_bytes=LIMIT)],
    }
    with serve(write_models(tmp_path_factory.mktemp("models")), listen=True, **options) as server:
        yield Ports(server.options.http_port, port_of(server, "openai"))
    log.setLevel(level)


def test_restricted_apis_need_their_header_on_every_host(ports: Ports) -> None:
    for port in ports:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.PermissionDeniedError, match="expecting header 'x-key'") as raised:
                client.completions.create(model="story", prompt="a")
            assert raised.value.code == "permission_denied"
            stream = client.completions.create(
                model="story", prompt="a b", stream=True, extra_headers={"x-key": "secret"}
            )
            assert "".join(chunk.choices[0].text for chunk in stream) == " a b"
            assert "story" in [model.id for model in client.models.list()]


BODY = b'{"model": "story", "prompt": "%b"}'
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Request-Id: mine\r\nX-Key: secret\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"POST /v1/nothing/here HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n", 404, "Invalid URL (POST /v1/noth"),
        (b"GET /v1/ HTTP/1.1\r\nHost: a\r\n\r\n", 404, "Invalid URL (GET /v1/)"),
        (b"DELETE /v1/models HTTP/1.1\r\nHost: a\r\n\r\n", 405, "Method Not Allowed"),
        (POST + b"Content-Length: 200001\r\n\r\n", 413, "has 200001 bytes, the limit is 200000"),
        (CHUNKED + b"30d41\r\n" + b"x" * 200_001 + b"\r\n0\r\n\r\n", 413, "the limit is 200000"),
        (CHUNKED + b"3\r\nabcde\r\n", 400, "a chunk is not as long as it says"),
        (CHUNKED + b"1\r\n{\r\nzz\r\n", 400, "the size of a chunk"),
        (POST + b"Content-Length: 3\r\n\r\nabc", 400, "Invalid value. at 0"),
        (POST + b"Content-Length: 3\r\nContent-Encoding: gzip\r\n\r\nabc", 400, "Content-Encoding"),
    ],
    ids=["path", "root", "method", "large", "large chunks", "long chunk", "no chunk", "no JSON", "compressed"],
)
def test_a_refusal_has_openais_form(ports: Ports, sent: bytes, status: int, message: str) -> None:
    for port in ports:
        found, headers, body = ask(port, sent)
        assert (found, message in json.loads(body)["error"]["message"]) == (status, True), body
        assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert (b"\r\nx-request-id: mine" in headers.lower()) == (b"mine" in sent)


def test_a_body_that_breaks_while_it_is_read_is_refused(ports: Ports) -> None:
    waiting = POST + b"Transfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n"
    for port in ports:
        found, _, body = ask(port, waiting, b"zz\r\n")
        assert (found, "the size of a chunk" in json.loads(body)["error"]["message"]) == (400, True), body


def test_a_port_of_openais_routes_has_no_other_form(ports: Ports) -> None:
    for sent, status in ((b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n", 404), (b"rubbish\r\n\r\n", 400)):
        assert "message" in json.loads(ask(ports.own, sent)[2])["error"]
        found, _, body = ask(ports.first, sent)
        assert (found, type(json.loads(body)["error"])) == (status, str)


def test_a_body_up_to_the_limit_is_read(ports: Ports) -> None:
    body = BODY % (b"a" * (LIMIT - len(BODY) + 2))
    assert len(body) == LIMIT
    for port in ports:
        found, _, answer = ask(port, POST + b"Content-Length: %d\r\n\r\n%b" % (LIMIT, body))
        assert (found, len(json.loads(answer)["choices"][0]["text"])) == (200, LIMIT - len(BODY) + 3)


def ask(port: int, sent: bytes, behind: bytes = b"") -> tuple[int, bytes, bytes]:
    """Return the status, the head and the body of the answer to the bytes ``sent``; and ``behind`` a 100 Continue."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(sent)
        if behind:
            received = b""
            while not received.endswith(b"\r\n\r\n"):
                received += (chunk := connection.recv(1 << 16))
                assert chunk, received
            assert received.startswith(b"HTTP/1.1 100"), received
            for _ in range(3):  # meanwhile the application begins to read the body
                ask(port, b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n")
            connection.sendall(behind)
        received = b""
        while b"\r\n\r\n" not in received:
            received += (chunk := connection.recv(1 << 16))
            assert chunk, received
        head, _, body = received.partition(b"\r\n\r\n")
        (length,) = [int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        while len(body) < length:
            body += connection.recv(1 << 20)
    return int(head[9:12]), head, body
