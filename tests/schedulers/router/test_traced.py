"""The decision of a router in the spans of a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING

from tests.extensions.trace.collector import collecting

from .conftest import identity, router, write

if TYPE_CHECKING:
    from tests.conftest import Headrace


def test_the_span_of_a_router_contains_and_names_the_target(serve: Callable[..., Headrace], tmp_path: Path) -> None:
    write(tmp_path, "m", identity(more="version_policy { all { } }"), (1, 2))
    write(tmp_path, "r", router("m:1 = 1, m:2 = 0", rules="parameter:beta -> m:2", shadow="m:2 = 1"))
    with collecting() as collector:
        settings = ("mode=opentelemetry", f"opentelemetry,url={collector.url}", "level=TIMESTAMPS", "rate=1")
        server = serve(f"--model-repository={tmp_path}", *[f"--trace-config={setting}" for setting in settings])
        connection = HTTPConnection("127.0.0.1", server.http, timeout=60)
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 1], "data": [1]}
        for parameters in ({}, {"beta": True}):
            body = json.dumps({"inputs": [tensor], "parameters": parameters})
            connection.request("POST", "/v2/models/r/infer", body)
            assert connection.getresponse().read()
        connection.close()
        server.stop()
    found = []
    for span in collector.spans:
        if span.name == "r":
            (inner,) = [each for each in collector.spans if each.parent_id == span.id and each.name == "m"]
            attributes = [span.attributes[f"headrace.{name}"] for name in ("target", "routed_by")]
            found.append((*attributes, inner.attributes["triton.model_version"]))
    assert found == [("m:1", "weights", "1"), ("m:2", "rule", "2")]
