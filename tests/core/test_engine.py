"""`Engine.responses` keeps no references."""

from __future__ import annotations

import asyncio
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest

from headrace.config.options import ServerOptions
from headrace.engine import Engine
from headrace.errors import BackendError, InvalidArgument
from headrace.messages.request import InferRequest
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket
from headrace.server import Server


class FreedRequest(InferRequest):
    """A request that records when it is freed."""

    __slots__ = ("__weakref__",)


def test_a_request_that_fails_is_free_at_once() -> None:
    """The collector of cycles does not run in these tests."""

    def enqueue(ticket: Ticket) -> None:
        ticket.respond(BackendError("broken"), True)

    view = SimpleNamespace(decoupled=False, check=lambda ticket: None, enqueue=enqueue)
    table = SimpleNamespace(resolve=lambda name, version: view)
    engine = Engine(ServerOptions(model_repository=("models",)), cast("Any", table))

    async def ask() -> weakref.ref[FreedRequest]:
        request = FreedRequest("m", {"x": np.zeros(4, np.float32)})
        request_ref = weakref.ref(request)
        responses = engine.responses(request)
        del request
        with pytest.raises(BackendError) as caught:
            await anext(responses)
        del caught, responses
        return request_ref

    assert asyncio.run(ask())() is None


def test_errors_between_responses_are_yielded_if_asked_for() -> None:
    broken, last = BackendError("broken"), BackendError("last")
    response = InferResponse({}, model_name="m")

    def enqueue(ticket: Ticket) -> None:
        for answer in (response, broken, response):
            ticket.respond(answer, False)
        ticket.respond(last, True)

    view = SimpleNamespace(decoupled=True, check=lambda ticket: None, enqueue=enqueue)
    engine = Engine(ServerOptions(model_repository=("models",)), cast("Any", SimpleNamespace(resolve=lambda *_: view)))

    async def collect(count: int, *with_errors: Any) -> list[Any]:
        answers = engine.responses(InferRequest("m", {"x": np.zeros(4, np.float32)}), None, *with_errors)
        seen: list[Any] = [await anext(answers) for _ in range(count)]
        with pytest.raises(BackendError) as end:
            await anext(answers)
        return [*seen, end.value]

    assert asyncio.run(collect(3, True)) == [response, broken, response, last]
    assert asyncio.run(collect(1)) == [response, broken]


@pytest.mark.parametrize("strings", [np.array(["a", b"\xff", "é"], np.object_), np.array([b"a", b"b", b"c"])])
def test_responses_take_arrays_of_strings(tmp_path: Path, strings: npt.NDArray[Any]) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    (tmp_path / "m/config.pbtxt").write_text(
        'backend: "identity" input { name: "x" data_type: TYPE_STRING dims: -1 } '
        'output { name: "x" data_type: TYPE_STRING dims: -1 }'
    )

    async def ask(server: Server, x: Any) -> list[bytes]:
        (response,) = [each async for each in server.engine.responses(InferRequest("m", {"x": x}))]
        answer = response.outputs["x"]
        assert isinstance(answer, BytesTensor)
        return answer.to_objects().tolist()  # type: ignore[no-any-return]

    async def main() -> None:
        async with Server(tmp_path, allow_http=False, allow_grpc=False, allow_metrics=False) as server:
            encoded = BytesTensor.from_objects(strings)
            assert await ask(server, strings) == await ask(server, encoded) == encoded.to_objects().tolist()

    asyncio.run(main())


def test_half_a_surrogate_pair_is_refused_by_the_name_of_its_input(tmp_path: Path) -> None:
    inputs = {"n": np.zeros(1, np.float32), "s": np.array(["fine", "a\ud800b"], np.object_)}
    text = r"input 's': '\\ud800' is half a surrogate pair"

    async def main() -> None:
        quiet = {"allow_http": False, "allow_grpc": False, "allow_metrics": False}
        async with Server(tmp_path, model_control_mode="explicit", **quiet) as server:
            with pytest.raises(InvalidArgument, match=text):
                await anext(server.engine.responses(InferRequest("m", inputs)))
            with pytest.raises(InvalidArgument, match=text):
                await server.infer_async("m", inputs)

    asyncio.run(main())
