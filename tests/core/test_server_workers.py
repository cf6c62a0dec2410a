"""A server that is one of several on one port refuses what needs all requests, or all servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.frontends.base import Frontend
from headrace.messages.ticket import Ticket
from headrace.registry import PluginInfo
from headrace.schedulers.base import InstanceInfo, Scheduler
from headrace.server import Server

MakeServer = Callable[..., Server]
ONE = {"x": np.ones((1, 2), np.float32)}
CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 2 } output { name: "y" data_type: TYPE_FP32 dims: 2 }
"""


class Remembering(Scheduler):
    name = "remembering"
    is_stateful = True

    def next(self, instance: InstanceInfo, now_ns: int) -> Sequence[Ticket]:
        return self.context.waiting.head(1)


@pytest.fixture
def serve(write_model: Any, make_server: MakeServer) -> Callable[..., Server]:
    """A server of ``m``, whose scheduler keeps state, and of ``n``, which keeps none."""
    write_model("m", CONFIG + 'parameters { key: "scheduler" value { string_value: "remembering" } }')
    write_model("n", CONFIG)

    def make(**options: Any) -> Server:
        server = make_server(exit_on_error=False, http_address="127.0.0.1", **options)
        server.plugins.schedulers.add(Remembering, PluginInfo("remembering", "tests", "0"))
        return server

    return make


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_model_that_keeps_state_is_refused_by_its_name_and_the_reason(
    serve: Callable[..., Server], workers: int
) -> None:
    async def scenario() -> None:
        async with serve(workers=workers) as server:
            answer = await server.infer_async("n", ONE)
            assert np.array_equal(np.asarray(answer.outputs["y"]), ONE["x"])
            reasons = {entry.name: entry.reason for entry in server.index()}
            if workers < 2:
                assert reasons["m"] == ""
                return
            assert (
                "model 'm' cannot be served with --workers=2: its scheduler 'remembering' keeps state from one "
                "request to the next" in reasons["m"]
            )

    asyncio.run(scenario())


class OwnPort(Frontend):
    """A stranger's, which listens where no other may."""

    name = "own"
    enabled = True

    async def start(self) -> None:
        raise AssertionError("it would listen")

    async def stop(self) -> None: ...


def test_a_frontend_that_does_not_share_its_port_is_refused(serve: Callable[..., Server]) -> None:
    async def scenario() -> None:
        server = serve(workers=2, allow_http=False, allow_grpc=False, allow_metrics=False)
        server.plugins.frontends.add(OwnPort, PluginInfo("own", "tests", "0"))
        try:
            with pytest.raises(ConfigError, match="--workers=2 is refused with the frontend 'own'"):
                await server.start_frontends()
        finally:
            await server.stop()

    asyncio.run(scenario())
