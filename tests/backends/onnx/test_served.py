"""ONNX models behind a server: no config, bad config, bad neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto

from headrace import BytesTensor, InvalidArgument, Server
from headrace_testing.serving import on_loop, serve


@pytest.fixture
def server(graphs: Any) -> Iterator[Server]:
    graphs.add("bare")
    graphs.identity(TensorProto.STRING, ["n", 1], name="echo")
    (graphs.root / "echo" / "config.pbtxt").write_text(
        "dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 200000 }"
    )
    (graphs.add("broken") / "model.onnx").write_bytes(b"no model")
    graphs.add("misspelt")
    (graphs.root / "misspelt" / "config.pbtxt").write_text(
        'parameters { key: "intra_op_thread_cuont" value { string_value: "1" } }'
    )
    with serve(graphs.root, exit_on_error=False) as server:
        yield server


def test_a_model_without_a_config_is_served(server: Server, pair: Any) -> None:
    outputs = server.infer("bare", {"A": pair[0], "B": pair[1]}).outputs
    np.testing.assert_array_equal(outputs["S"], pair[0] + pair[1])
    assert server.resolve("bare").config.max_batch_size == 4
    assert server.resolve("bare").config.backend == "onnxruntime"
    assert len(server.resolve("bare").config.dynamic_batching.preferred_batch_size) <= 1


def test_a_broken_model_does_not_affect_the_others(server: Server) -> None:
    states = {entry.name: (entry.state, entry.reason) for entry in server.index()}
    assert states["bare"][0] == states["echo"][0] == "READY"
    assert states["broken"][0] == "UNAVAILABLE"
    assert str(Path("broken", "1", "model.onnx")) in states["broken"][1]


def test_a_misspelt_parameter_is_ignored_as_in_triton(server: Server) -> None:
    """The tests of core check the warning."""
    assert next(entry.state for entry in server.index() if entry.name == "misspelt") == "READY"


def test_bytes_that_are_no_text_fail_alone_in_their_batch(server: Server) -> None:
    texts = [b"one", b"\xff", b"three", b"four"]

    async def ask() -> list[Any]:
        answers = [server.infer_async("echo", {"x": BytesTensor.from_items([text], (1, 1))}) for text in texts]
        return await asyncio.gather(*answers, return_exceptions=True)

    found = on_loop(server, ask())
    assert isinstance(found.pop(1), InvalidArgument)
    assert [answer.outputs["y"].items() for answer in found] == [[b"one"], [b"three"], [b"four"]]


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_model_is_served_and_unloaded_with_each_isolation(graphs: Any, pair: Any, isolation: str) -> None:
    setting = f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}'
    graphs.add("m")
    (graphs.root / "m" / "config.pbtxt").write_text(setting)
    (graphs.add("broken") / "model.onnx").write_bytes(b"no model")
    (graphs.root / "broken" / "config.pbtxt").write_text(
        setting
        + """ max_batch_size: 4 input { name: "A" data_type: TYPE_FP32 dims: [16] }
        output { name: "S" data_type: TYPE_FP32 dims: [16] }"""
    )
    with serve(graphs.root, exit_on_error=False, model_control_mode="explicit", load_model=("*",)) as server:
        reasons = {entry.name: entry.reason for entry in server.index()}
        assert "onnx runtime error" in reasons["broken"]
        outputs = server.infer("m", {"A": pair[0], "B": pair[1]}).outputs
        np.testing.assert_array_equal(outputs["S"], pair[0] + pair[1])

        async def unload() -> None:
            await server.unload("m")
            while {entry.name: entry.reason for entry in server.index()}["m"] != "unloaded":
                await asyncio.sleep(0.01)

        on_loop(server, asyncio.wait_for(unload(), 20))
