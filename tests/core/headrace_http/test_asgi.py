"""The ASGI application, driven by hand as a server would."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import AnyOperation, Caller, Interceptor
from headrace.models.interceptors import make_interceptors
from headrace_http.asgi import _TURN_BYTES, _Broken, _Streamed, create_app
from headrace_http.message import HttpReply

MakeCaller = Callable[..., Any]
X = {"X": ("UINT8", (-1,))}
GONE = {"type": "http.disconnect"}
ALICE = {"subject": ((("commonName", "alice"),),)}


def pieces(*bodies: bytes) -> list[dict[str, Any]]:
    return [{"type": "http.request", "body": body, "more_body": True} for body in bodies[:-1]] + [
        {"type": "http.request", "body": bodies[-1], "more_body": False}
    ]


async def call(
    caller: Any,
    method: str,
    path: str,
    events: Sequence[dict[str, Any]],
    headers: Sequence[tuple[bytes, bytes]] = (),
    sent: list[Any] | None = None,
    **further: Any,
) -> tuple[int, bytes] | None:
    """Status and body, or None if the application did not answer. All that it sends is added to ``sent``."""
    pending, sent = list(events), [] if sent is None else sent

    async def receive() -> dict[str, Any]:
        if pending:
            return pending.pop(0)
        await asyncio.Event().wait()  # as long as the caller stays
        raise AssertionError

    async def send(event: Any) -> None:
        sent.append(event)

    scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": list(headers)}
    await create_app(caller.engine)(scope | further, receive, send)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "a task is left of the request"
    if not sent:
        return None
    return sent[0]["status"], b"".join(event.get("body", b"") for event in sent[1:])


def test_request_is_answered(make_caller: MakeCaller) -> None:
    status, body = asyncio.run(call(make_caller(X), "GET", "/v2/health/live?x", pieces(b""))) or (0, b"")
    assert (status, body) == (200, b"")


@pytest.mark.parametrize("cuts", [(), (9,), (9, 20), (9, 20, 21)], ids=["whole", "two", "three", "four"])
def test_a_body_means_the_same_whole_and_in_pieces(make_caller: MakeCaller, cuts: tuple[int, ...]) -> None:
    caller = make_caller(X)
    text = b'{"inputs":[{"name":"X","datatype":"UINT8","shape":[3],"data":[1,2,3]}]}'
    parts = [text[start:end] for start, end in zip((0, *cuts), (*cuts, None), strict=True)]
    answer = asyncio.run(call(caller, "POST", "/v2/models/echo/infer", pieces(*parts)))
    assert answer is not None
    assert (answer[0], json.loads(answer[1])["outputs"][0]["data"]) == (200, [1, 2, 3])


@pytest.mark.parametrize(
    ("size", "count"), [(_TURN_BYTES // 2, 1), (_TURN_BYTES * 2, 4)], ids=["in one", "a turn at a time"]
)
def test_an_answer_goes_out_in_one_piece_if_it_is_small(make_caller: MakeCaller, size: int, count: int) -> None:
    """The pieces of the large answer: head, two turns of tensor, and the end."""
    caller, sent = make_caller(X), list[Any]()
    tensor = {"name": "X", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    length = [(b"inference-header-content-length", str(len(head)).encode())]
    events = pieces(head + b"x" * size)
    answer = asyncio.run(call(caller, "POST", "/v2/models/echo/infer", events, length, sent=sent))
    assert answer is not None
    assert answer[0] == 200
    assert answer[1].endswith(b"x" * size)
    bodies = [event["body"] for event in sent if event["type"] == "http.response.body"]
    assert len(bodies) == count
    assert max(map(len, bodies)) <= _TURN_BYTES


def test_tensors_of_a_body_in_pieces_are_aligned(make_caller: MakeCaller) -> None:
    caller = make_caller(X)
    entry = {"name": "X", "datatype": "UINT8", "shape": [4], "parameters": {"binary_data_size": 4}}
    text = json.dumps({"inputs": [entry]}).encode()
    length = [(b"inference-header-content-length", str(len(text)).encode())]
    answer = asyncio.run(
        call(caller, "POST", "/v2/models/echo/infer", pieces(text[:9], text[9:] + b"ab", b"cd"), length)
    )
    assert answer is not None
    assert answer[0] == 200
    array = caller.model.requests[0].inputs["X"]
    assert isinstance(array, np.ndarray)
    assert array.tobytes() == b"abcd"
    assert array.ctypes.data % 64 == 0


class Witness(Interceptor):
    """Records the callers."""

    name: ClassVar[str] = "witness"
    seen: ClassVar[list[tuple[str, Any]]] = []

    def admit(self, caller: Caller, operation: AnyOperation, model: str) -> None:
        self.seen.append((caller.principal, caller.certificate))


@pytest.mark.parametrize("is_verbose", [False, True])
@pytest.mark.parametrize(
    ("extensions", "seen"),
    [
        (None, ("", None)),
        ({"tls": {}}, ("", None)),
        ({"headrace": {"certificate": ALICE}}, ("alice", ALICE)),
    ],
)
def test_interceptors_see_the_certificate_that_the_host_gives(
    make_caller: MakeCaller, caplog: pytest.LogCaptureFixture, is_verbose: bool, extensions: Any, seen: Any
) -> None:
    caplog.set_level(logging.DEBUG if is_verbose else logging.INFO, "headrace")
    caller = make_caller(X)
    caller.engine.admission = make_interceptors([Witness], caller.engine.options)
    Witness.seen.clear()
    asyncio.run(call(caller, "GET", "/v2/health/live", pieces(b""), extensions=extensions))
    assert Witness.seen == [seen]


def test_flood_of_chunks_and_oversize_are_refused(make_caller: MakeCaller) -> None:
    caller = make_caller(X, http_max_input_size=100_000)
    flood = asyncio.run(call(caller, "POST", "/v2", pieces(*[b"x"] * 65537)))
    assert flood is not None
    assert b"Chunked request body exceeds maximum of 65536 non-empty chunks" in flood[1]
    oversize = asyncio.run(call(caller, "POST", "/v2/models/echo/infer", pieces(*[b"x" * 60_000] * 3)[:2]))
    assert oversize is not None
    assert oversize[0] == 400


def test_announced_terabyte_is_refused_unread(make_caller: MakeCaller) -> None:
    answer = asyncio.run(call(make_caller(X), "POST", "/v2", [], [(b"content-length", b"1099511627776")]))
    assert answer is not None
    assert answer[0] == 400


@pytest.mark.parametrize(
    "headers",
    [[(b"content-length", b"3"), (b"transfer-encoding", b"chunked")], [(b"content-length", b"3")] * 2],
)
def test_two_statements_about_the_length_of_a_body_are_refused(
    make_caller: MakeCaller, headers: list[tuple[bytes, bytes]]
) -> None:
    answer = asyncio.run(call(make_caller(X), "POST", "/v2/models/echo/infer", pieces(b"abc"), headers))
    assert answer == (400, b'{"error":"the request states the length of its body twice"}')


@pytest.mark.parametrize("events", [[GONE], [{"type": "http.request", "body": b"x", "more_body": True}, GONE]])
def test_caller_that_leaves_early_is_not_answered(make_caller: MakeCaller, events: list[dict[str, Any]]) -> None:
    assert asyncio.run(call(make_caller(X), "POST", "/v2", events)) is None


def test_caller_that_leaves_while_waiting_cancels(make_caller: MakeCaller) -> None:
    caller = make_caller(X)
    caller.model.holds = True
    body = b'{"inputs":[{"name":"X","datatype":"UINT8","shape":[1],"data":[1]}]}'
    assert asyncio.run(call(caller, "POST", "/v2/models/echo/infer", [*pieces(body), GONE])) is None
    assert caller.model.tickets[0].cancelled


def test_an_answer_that_comes_later_leaves_no_task(make_caller: MakeCaller) -> None:
    async def main() -> tuple[int, bytes] | None:
        asyncio.get_running_loop().call_soon(lambda: caller.model.answer(caller.model.tickets[0]))
        body = b'{"inputs":[{"name":"X","datatype":"UINT8","shape":[1],"data":[1]}]}'
        return await call(caller, "POST", "/v2/models/echo/infer", pieces(body))

    caller = make_caller(X)
    caller.model.holds = True
    assert (asyncio.run(main()) or (0,))[0] == 200


def test_lifespan_is_acknowledged(make_caller: MakeCaller) -> None:
    events, sent = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}], []

    async def receive() -> Any:
        return events.pop(0)

    async def send(event: Any) -> None:
        sent.append(event["type"])

    asyncio.run(_run(create_app(make_caller(X).engine), receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def _run(app: Any, receive: Any, send: Any) -> None:
    await app({"type": "lifespan"}, receive, send)


def test_an_answer_that_breaks_off_is_not_said_to_be_whole(make_caller: MakeCaller) -> None:
    """The host gets the error, and closes the connection. The caller must not take the chunks for an answer."""

    async def main() -> list[Any]:
        sent: list[Any] = []

        async def send(event: Any) -> None:
            sent.append(event)

        answered: asyncio.Future[HttpReply | None] = asyncio.get_running_loop().create_future()
        streamed = _Streamed(answered, send, HttpReply(200, (), ()))
        await streamed.send(b"part")
        streamed.break_off()
        streamed.break_off()  # the second time changes nothing
        with pytest.raises(_Broken):
            answered.result()
        return sent

    assert [event.get("more_body") for event in asyncio.run(main())] == [None, True]
