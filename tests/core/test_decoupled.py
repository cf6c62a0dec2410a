"""A `StreamInstance` from its iterator to the stock gRPC client's stream."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from headrace.errors import Unsupported
from headrace.server import Server
from headrace_grpc.frontend import GrpcFrontend
from tests.core.countdown import CONFIG, with_countdowns


def ask(port: int, numbers: list[int]) -> dict[str, list[Any]]:
    """The responses to one stream with a request per number, by request id; errors as text."""
    responses: dict[str, list[Any]] = {}
    events: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: events.put((result, error)))
        for number in numbers:
            tensor = grpcclient.InferInput("n", [1], "INT32")
            tensor.set_data_from_numpy(np.array([number], np.int32))
            client.async_stream_infer("m", [tensor], request_id=str(number), enable_empty_final_response=True)
        ended = 0
        while ended < len(numbers):
            result, error = events.get(timeout=20)
            if error is not None:
                responses["error"] = [error.message()]
                ended += 1
                continue
            response = result.get_response()
            value = result.as_numpy("left")
            responses.setdefault(response.id, []).append("end" if value is None else int(value[0]))
            ended += response.parameters["triton_final_response"].bool_param
    return responses


@pytest.fixture
def server(write_model: Any, make_server: Callable[..., Server]) -> Server:
    write_model("m", CONFIG)
    return with_countdowns(make_server(grpc_address="127.0.0.1", grpc_port=0))


def test_a_stream_gives_every_response_in_order_and_a_final_one(server: Server) -> None:
    async def scenario() -> None:
        async with server:
            frontend = GrpcFrontend(server.engine)
            await frontend.start()
            try:
                first = await asyncio.to_thread(ask, frontend.port, [3, 0, 2])
                assert first == {"3": [3, 2, 1, "end"], "0": ["end"], "2": [2, 1, "end"]}
                failed = await asyncio.to_thread(ask, frontend.port, [14])
                assert failed["error"] == ["model 'm' failed to execute: ValueError: unlucky"]
                assert await asyncio.to_thread(ask, frontend.port, [1]) == {"1": [1, "end"]}
            finally:
                await frontend.stop()

    asyncio.run(scenario())


def test_a_decoupled_model_is_refused_where_one_answer_is_expected(server: Server) -> None:
    async def scenario() -> None:
        async with server:
            with pytest.raises(Unsupported, match="decoupled"):
                await server.infer_async("m", {"n": np.array([1], np.int32)})

    asyncio.run(scenario())
