"""A ragged ONNX model on a server. The oracle is ONNX Runtime, called with the inputs that Triton documents."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace import InvalidArgument, Server
from headrace_testing.serving import on_loop, serve

LENGTHS = (3, 4, 5)
CONFIG = """
max_batch_size: 16
input { name: "INPUT" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true }
output { name: "SUM" data_type: TYPE_FP32 dims: [1] }
output { name: "TWICE" data_type: TYPE_FP32 dims: [-1] }
batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "INDEX" data_type: TYPE_INT32
              source_input: "INPUT" }
batch_output { target_name: "TWICE" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "INPUT" }
dynamic_batching { preferred_batch_size: 3 max_queue_delay_microseconds: 60000000 }
instance_group { count: 1 kind: KIND_CPU }
"""


def write(graphs: Any, name: str, isolation: str) -> None:
    """``SUM`` is the sum of the elements of each request, ``TWICE`` each element doubled."""
    numbers = {"zero": [0], "one": [1], "two": [2], "end": [np.iinfo(np.int64).max]}
    constants = [numpy_helper.from_array(np.array(value, np.int64), key) for key, value in numbers.items()]
    constants += [numpy_helper.from_array(np.array(value, np.float32), key) for key, value in (("0.", [0]), ("2.", 2))]
    nodes = [
        helper.make_node("CumSum", ["INPUT", "zero"], ["sums"]),
        helper.make_node("Concat", ["0.", "sums"], ["all"], axis=0),
        helper.make_node("Gather", ["all", "INDEX"], ["at"]),
        helper.make_node("Slice", ["at", "one", "end"], ["ends"]),
        helper.make_node("Slice", ["at", "zero", "minus"], ["begins"]),
        helper.make_node("Sub", ["ends", "begins"], ["flat"]),
        helper.make_node("Unsqueeze", ["flat", "one"], ["SUM"]),
        helper.make_node("Mul", ["INPUT", "2."], ["TWICE"]),
    ]
    constants.append(numpy_helper.from_array(np.array([-1], np.int64), "minus"))
    inputs = {"INPUT": (TensorProto.FLOAT, ["elements"]), "INDEX": (TensorProto.INT32, ["ends"])}
    outputs = {"SUM": (TensorProto.FLOAT, ["n", 1]), "TWICE": (TensorProto.FLOAT, ["elements"])}
    graphs.write(nodes, inputs, outputs, constants, name)
    parameter = f'parameters {{ key: "isolation" value {{ string_value: "{isolation}" }} }}'
    (graphs.root / name / "config.pbtxt").write_text(CONFIG + parameter)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    from tests.backends.onnx.conftest import Graphs

    graphs = Graphs(tmp_path_factory.mktemp("ragged"))
    for isolation in ("thread", "process"):
        write(graphs, isolation, isolation)
    with serve(graphs.root) as server:
        yield server


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_requests_of_three_lengths_run_in_one_batch_as_the_engine_would(server: Server, isolation: str) -> None:
    requests = [np.arange(length, dtype=np.float32).reshape(1, length) + 10 * length for length in LENGTHS]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(server.infer_async(isolation, {"INPUT": x}) for x in requests))

    answers = on_loop(server, ask())
    session = onnxruntime.InferenceSession(server.options.model_repository[0] + f"/{isolation}/1/model.onnx")
    feed = {"INPUT": np.concatenate(requests, axis=1)[0], "INDEX": np.array([0, 3, 7, 12], np.int32)}
    sums, twice = session.run(["SUM", "TWICE"], feed)
    np.testing.assert_array_equal(np.concatenate([answer.outputs["SUM"] for answer in answers]), sums)
    np.testing.assert_array_equal(np.concatenate([answer.outputs["TWICE"][0] for answer in answers]), twice)
    assert [answer.outputs["TWICE"].shape for answer in answers] == [(1, length) for length in LENGTHS]
    np.testing.assert_allclose(sums[:, 0], [request.sum() for request in requests])
    last = server.explain(isolation)["batches"][-1]
    assert (last["requests"], last["rows"], last["reason"]) == (3, 3, "preferred_size")


def test_clients_neither_send_nor_receive_batch_inputs(server: Server) -> None:
    view = server.resolve("thread")
    assert list(view.inputs) == ["INPUT"]
    with pytest.raises(InvalidArgument, match="expected 1 inputs but got 2 inputs"):
        server.infer("thread", {"INPUT": np.ones((1, 2), np.float32), "INDEX": np.zeros((1, 2), np.int32)})
