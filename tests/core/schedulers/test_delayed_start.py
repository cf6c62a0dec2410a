"""Batchers that wait until a number of requests has arrived, which tests of a server set by its environment."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.schedulers.base import DelayedStart
from headrace.server import Server
from tests.core.conftest import IDENTITY, WriteModel

REQUESTS, BACKLOG = "TRITONSERVER_DELAY_SCHEDULER", "TRITONSERVER_BACKLOG_DELAY_SCHEDULER"
ROW = {"x": np.ones((1, 1), np.float32)}


def test_environment_variable_is_read() -> None:
    assert DelayedStart.from_environ({}) == DelayedStart(0, 0)
    assert DelayedStart.from_environ({REQUESTS: "12", BACKLOG: "2"}) == DelayedStart(12, 2)
    assert DelayedStart.from_environ({REQUESTS: "", BACKLOG: "0"}) == DelayedStart(0, 0)


@pytest.mark.parametrize("text", ["many", "-1", "1.5", "1" * 20])
@pytest.mark.parametrize("name", [REQUESTS, BACKLOG])
def test_invalid_number_of_requests_is_refused_by_name(name: str, text: str) -> None:
    with pytest.raises(
        ConfigError, match=f"the environment variable {name} is '{text}', expected a number of requests"
    ):
        DelayedStart.from_environ({name: text})


def test_a_model_does_not_load_if_the_environment_variable_is_no_number(
    make_server: Callable[..., Server], write_model: WriteModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REQUESTS, "many")
    write_model("m")
    with make_server(exit_on_error=False) as server:
        (entry,) = server.index()
    assert "the environment variable TRITONSERVER_DELAY_SCHEDULER is 'many'" in entry.reason


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_nothing_runs_until_as_many_wait_and_then_it_is_a_batcher_like_any(
    make_server: Callable[..., Server], write_model: WriteModel, monkeypatch: pytest.MonkeyPatch, isolation: str
) -> None:
    monkeypatch.setenv(REQUESTS, "5")
    parameter = f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}'
    write_model("m", f"{IDENTITY} dynamic_batching {{ }} {parameter}")
    write_model("direct")
    with make_server() as server:
        server.infer("direct", ROW)  # has no batcher
        with ThreadPoolExecutor(5) as callers:
            for call in [callers.submit(server.infer, "m", ROW) for _ in range(5)]:
                call.result(90)
        assert [batch["rows"] for batch in server.explain("m")["batches"]] == [5]
        server.infer("m", ROW)
        assert [batch["rows"] for batch in server.explain("m")["batches"]] == [5, 1]
