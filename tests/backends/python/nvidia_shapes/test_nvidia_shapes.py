"""A repository of the shapes of python_backend's examples, served by ``headrace serve``, with the stock clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

from tests.backends.python.nvidia_shapes.questions import QUESTIONS, STREAMS, agree, ask, stream
from tests.backends.python.nvidia_shapes.repository import write


@pytest.fixture(scope="module", params=["process", "thread"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Any]
) -> Any:
    root = write(tmp_path_factory.mktemp("shapes"))
    return keep_serving(f"--model-repository={root}", f"--backend-config=python,isolation={request.param}")


@pytest.mark.parametrize("module", [http, grpc])
@pytest.mark.parametrize(
    ("model", "arrays", "expected"), QUESTIONS, ids=[f"{n}-{each[0]}" for n, each in enumerate(QUESTIONS)]
)
def test_a_model_answers_as_on_triton(server: Any, module: Any, model: str, arrays: Any, expected: Any) -> None:
    found = ask(module, server.http if module is http else server.grpc, model, arrays)
    assert agree(found, expected), found


@pytest.mark.parametrize(
    ("model", "arrays", "expected"), STREAMS, ids=[f"{n}-{each[0]}" for n, each in enumerate(STREAMS)]
)
def test_a_decoupled_model_streams_as_on_triton(server: Any, model: str, arrays: Any, expected: Any) -> None:
    assert stream(server.grpc, model, arrays) == expected


def test_the_metrics_of_a_model_are_on_the_page_but_for_the_family_that_it_dropped(server: Any) -> None:
    arrays = next(arrays for model, arrays, _ in QUESTIONS if model == "custom_metrics")
    ask(http, server.http, "custom_metrics", arrays)
    _, page = server.get("/metrics", server.ports["Metrics Service"])
    assert b'shapes_requests_total{model="custom_metrics",version="1"}' in page
    assert b"shapes_level 1" in page
    assert b"shapes_dropped" not in page
    assert "counted 3" in server.log
