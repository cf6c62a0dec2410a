"""A server that can not trace pays nothing for the distribution that is installed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import Caller, InferRequest, Operation, Server, ServerOptions, Ticket
from headrace.config.option_parts import TraceSetting
from headrace.models.instance_set import InstanceSet
from headrace_trace.settings import Sampler, SettingsTable, TraceSettings
from headrace_trace.tracer import TRACERS


@pytest.fixture
def echo(tmp_path: Path) -> Path:
    """A repository with the model ``echo``."""
    (tmp_path / "echo/1").mkdir(parents=True)
    (tmp_path / "echo/config.pbtxt").write_text(
        'backend: "identity" input { name: "x" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "y" data_type: TYPE_FP32 dims: 1 }'
    )
    return tmp_path


def observers_of(server: Server) -> list[Any]:
    (model,) = server.served()
    assert isinstance(model.instances, InstanceSet)
    return model.instances._observers


def test_without_a_trace_target_there_is_no_interceptor_and_no_observer(echo: Path) -> None:
    with Server(str(echo)) as server:
        assert server.engine.admission is None
        assert not TRACERS
        assert observers_of(server) == []


def test_a_model_is_observed_only_while_one_of_its_calls_is_traced(echo: Path) -> None:
    """The executions of all others cost nothing."""
    place, level, rate = ("triton", "file", str(echo / "trace.json")), ("", "level", "TIMESTAMPS"), ("", "rate", "2")
    settings = tuple(TraceSetting(*each) for each in (place, level, rate))
    seen: list[int] = []

    async def infer(server: Server) -> None:
        engine, arrived = server.engine, asyncio.Event()
        view = engine.resolve("echo")
        for _ in range(4):
            caller, request = Caller("http"), InferRequest("echo", {"x": np.ones(1, np.float32)})
            await engine.admit(caller, Operation.INFER, "echo")
            ticket = Ticket(request, lambda answer, final: arrived.set())
            engine.submitter(None, lambda call, ticket: call).start(view, ticket, caller)
            seen.append(len(observers_of(server)))
            await arrived.wait()
            caller.end()
            await asyncio.sleep(0.01)
            seen.append(len(observers_of(server)))
            arrived.clear()

    with Server(ServerOptions(model_repository=(str(echo),), trace_config=settings)) as server:
        server._call(infer, server)
    assert seen == [0, 0, 1, 0, 0, 0, 1, 0]
    events = [each for each in json.loads((echo / "trace.json").read_text()) if "timestamps" in each]
    assert [each["timestamps"][0]["name"] for each in events].count("COMPUTE_START") == 2


def test_skipped_requests_count_as_seen() -> None:
    sampled, skipped = Sampler(TraceSettings(("TIMESTAMPS",), rate=5)), Sampler(TraceSettings(("TIMESTAMPS",), rate=5))
    expected = [sampled.sample() for _ in range(23)]
    found: list[bool] = []
    left = 0
    while len(found) < 23:
        if left:
            left -= 1
            found.append(False)
        else:
            found.append(skipped.sample())
            left = skipped.spare()
    assert found == expected == [number % 5 == 4 for number in range(23)]


def test_a_change_of_settings_is_logged() -> None:
    changes: list[int] = []
    table = SettingsTable(TraceSettings(file="x"), lambda: changes.append(1))
    table.apply("", table.merged("", {"level": ("TIMESTAMPS",), "rate": 1}))
    table.apply("m", table.merged("m", {"rate": 7}))
    assert len(changes) == 2
    assert (table.of("m").rate, table.of("n").rate) == (7, 1)
