"""An ONNX model with a few fixed sizes and padded requests. The oracle is ONNX Runtime with each request alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from headrace import InvalidArgument, Server
from headrace_testing.serving import on_loop, serve

PAD = {
    "input": "x",
    "axis": 0,
    "buckets": [4, 8],
    "value": 7,
    "mask": {"name": "mask", "data_type": "TYPE_FP32"},
}
PADDING = {"pad": [PAD], "pad_batch_to": [4, 8]}
CONFIG = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [-1] }
output { name: "sum" data_type: TYPE_FP32 dims: [1] }
output { name: "square" data_type: TYPE_FP32 dims: [-1] }
dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 60000000 }
instance_group { count: 1 kind: KIND_CPU }
"""


def write(graphs: Any, name: str, padding: dict[str, Any], isolation: str = "thread") -> None:
    """``sum`` adds up the elements in the mask, ``square`` is element by element."""
    nodes = [
        helper.make_node("Mul", ["x", "mask"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "axes"], ["sum"], keepdims=1),
        helper.make_node("Mul", ["x", "x"], ["square"]),
    ]
    axes = helper.make_tensor("axes", TensorProto.INT64, [1], [1])
    io = (TensorProto.FLOAT, ["rows", "length"])
    outputs = {"sum": (TensorProto.FLOAT, ["rows", 1]), "square": io}
    graphs.write(nodes, {"x": io, "mask": io}, outputs, [axes], name)
    values = {"isolation": isolation, "padding": json.dumps(padding).replace('"', '\\"')}
    parameters = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in values.items()]
    (graphs.root / name / "config.pbtxt").write_text(CONFIG + "\n".join(parameters))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.backends.onnx.conftest import Graphs

    graphs = Graphs(tmp_path_factory.mktemp("padded"))
    for isolation in ("thread", "process"):
        write(graphs, isolation, PADDING, isolation)
    pad = {**PAD, "mask": {"name": "mask", "data_type": "TYPE_INT32"}}
    write(graphs, "typed", {"pad": [pad]})
    write(graphs, "unknown", {"pad": [{**pad, "mask": {"name": "shade", "data_type": "TYPE_FP32"}}]})
    with serve(graphs.root, exit_on_error=False) as server:
        yield server


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_three_lengths_run_in_one_batch_and_each_is_answered_as_if_alone(server: Server, isolation: str) -> None:
    requests = [np.arange(1, length + 1, dtype=np.float32).reshape(1, length) for length in (2, 4, 3)]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(server.infer_async(isolation, {"x": x}) for x in requests))

    answers = on_loop(server, ask())
    session = onnxruntime.InferenceSession(server.options.model_repository[0] + f"/{isolation}/1/model.onnx")
    for request, answer in zip(requests, answers, strict=True):
        total, square = session.run(["sum", "square"], {"x": request, "mask": np.ones_like(request)})
        np.testing.assert_array_equal(answer.outputs["sum"], total)
        np.testing.assert_array_equal(answer.outputs["square"], square)
    last = server.explain(isolation)["batches"][-1]
    assert (last["requests"], last["rows"], last["reason"]) == (3, 3, "preferred_size")
    (version,) = server.served(isolation)
    assert version.snapshot().executions.inference_count == 3  # the fourth row is padding


def test_a_request_larger_than_every_bucket_is_refused_alone(server: Server) -> None:
    with pytest.raises(InvalidArgument, match=r"input 'x' has size 9 on axis 0, .* is 8 of \[4, 8\]"):
        server.infer("thread", {"x": np.ones((1, 9), np.float32)})


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("typed", "configuration expects datatype TYPE_INT32 for input 'mask', model provides TYPE_FP32"),
        ("unknown", "unexpected inference input 'shade', allowed inputs are: mask, x"),
    ],
)
def test_a_mask_that_the_graph_does_not_take_is_refused_at_load(server: Server, name: str, why: str) -> None:
    (entry,) = [each for each in server.index() if each.name == name]
    assert why in entry.reason
