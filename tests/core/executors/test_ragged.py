"""Ragged batches against the examples of Triton's documentation and of its config, and against arithmetic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.base import Instance, Tensors
from headrace.config.config_json import config_to_json
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import BackendError, InvalidArgument
from headrace.executors.instance import run_batch, runner_for
from headrace.executors.output_schema import OutputSchema
from headrace.executors.ragged import RaggedLayout
from headrace.executors.runner import RowsRunner, Runner
from headrace.messages.response import InferResponse
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Ticket
from headrace.models.signature import Signature
from tests.core.conftest import make_ticket

KINDS = (
    "BATCH_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT",
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO",
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE",
    "BATCH_ITEM_SHAPE",
    "BATCH_ITEM_SHAPE_FLATTEN",
)
X = 'input { name: "x" data_type: TYPE_FP32 dims: [%s] allow_ragged_batch: true }'
Y = 'output { name: "y" data_type: TYPE_FP32 dims: [%s] }'


class Records(Instance):
    """Records its inputs. ``y`` is ``x``, and ``rows`` counts."""

    def __init__(self) -> None:
        self.received: list[Mapping[str, Any]] = []

    def execute(self, inputs: Tensors) -> Tensors:
        self.received.append(inputs)
        if any(np.any(np.asarray(x) == 13) for x in inputs.values() if not isinstance(x, BytesTensor)):
            raise ValueError("unlucky")
        return {"y": inputs["x"], "z": inputs["w"] if "w" in inputs else inputs["x"]}


def config(text: str, max_batch_size: int = 16) -> ModelConfig:
    return text_format.Parse(f'name: "m" max_batch_size: {max_batch_size} {text}', ModelConfig())


def runner(model: ModelConfig, instance: Instance) -> Runner:
    signature = Signature("m", model)
    schema = OutputSchema("m", "1", signature.outputs, signature.batched)
    return runner_for(instance, schema, RaggedLayout.from_json(config_to_json(model)))


def made(kind: str, datatype: str = "TYPE_INT32") -> str:
    return f'batch_input {{ kind: {kind} target_name: "{kind}" data_type: {datatype} source_input: "x" }}'


def sent(model: ModelConfig, *inputs: Mapping[str, Any], **fields: Any) -> list[Ticket]:
    tickets = [make_ticket("m", each, **fields) for each in inputs]
    for ticket in tickets:
        Signature("m", model).check(ticket)
    return tickets


def of_shapes(*shapes: Sequence[int]) -> list[dict[str, Any]]:
    """A request of each shape; the elements of all count on from 100."""
    begins = np.cumsum([0, *(np.prod(shape) for shape in shapes)])
    return [
        {"x": np.arange(100 + begin, 100 + begin + np.prod(shape), dtype=np.float32).reshape(shape)}
        for begin, shape in zip(begins, shapes, strict=False)
    ]


def outputs(answer: object) -> Mapping[str, Any]:
    assert isinstance(answer, InferResponse), answer
    return answer.outputs


SCATTER = 'batch_output { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }'


@pytest.mark.parametrize("datatype", ["TYPE_FP32", "TYPE_INT32"])
def test_the_example_of_tritons_documentation(datatype: str) -> None:
    model, instance = config(X % -1 + Y % -1 + made(KINDS[1], datatype) + SCATTER), Records()
    run_batch(runner(model, instance), sent(model, *of_shapes((1, 3), (1, 4), (1, 5))))
    (received,) = instance.received
    assert received["x"].shape == (12,)
    assert received["x"].tolist() == [*range(100, 112)]
    assert received[KINDS[1]].tolist() == [3, 7, 12]
    assert received[KINDS[1]].dtype == {"TYPE_FP32": np.float32, "TYPE_INT32": np.int32}[datatype]


#: For a request of two rows of [3, 1] and one of a row of [2, 2]: the example in Triton's config, and arithmetic.
EXAMPLE: dict[str, Any] = {
    "BATCH_ELEMENT_COUNT": [6, 4],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [6, 10],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 6, 10],
    "BATCH_ITEM_SHAPE": [[3, 1], [3, 1], [2, 2]],
    "BATCH_ITEM_SHAPE_FLATTEN": [3, 1, 3, 1, 2, 2],
}


@pytest.mark.parametrize("datatype", ["TYPE_FP32", "TYPE_INT32"])
def test_every_kind_of_batch_input(datatype: str) -> None:
    text = "".join(made(kind, datatype) for kind in KINDS)
    model, instance = config(X % "-1, -1" + Y % "-1, -1" + text + SCATTER), Records()
    run_batch(runner(model, instance), sent(model, *of_shapes((2, 3, 1), (1, 2, 2))))
    (received,) = instance.received
    assert {kind: received[kind].tolist() for kind in EXAMPLE} == EXAMPLE
    assert received["BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"].shape == (6,)
    assert {received[kind].dtype for kind in KINDS} == {np.dtype(np.float32 if datatype == "TYPE_FP32" else np.int32)}


def test_a_request_alone_is_a_ragged_batch_too() -> None:
    model, instance = config(X % -1 + Y % -1 + made(KINDS[2]) + SCATTER), Records()
    (answer,), _ = run_batch(runner(model, instance), sent(model, *of_shapes((2, 3))))
    assert instance.received[0]["x"].shape == (6,)
    assert instance.received[0][KINDS[2]].tolist() == [0, 6]
    assert outputs(answer)["y"].tolist() == [[100, 101, 102], [103, 104, 105]]


def test_one_batch_input_may_have_several_names() -> None:
    text = 'batch_input { target_name: ["a", "b"] data_type: TYPE_INT32 source_input: "x" }'
    model, instance = config(X % -1 + Y % -1 + text + SCATTER), Records()
    run_batch(runner(model, instance), sent(model, *of_shapes((1, 3), (1, 1))))
    assert [instance.received[0][name].tolist() for name in "ab"] == [[3, 1], [3, 1]]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=6))
def test_each_request_gets_the_outputs_of_its_own_input_in_its_shape(shapes: list[tuple[int, int, int]]) -> None:
    model = config(X % "-1, -1" + Y % "-1, -1" + SCATTER, 100)
    requests = of_shapes(*shapes)
    answers, _ = run_batch(runner(model, Records()), sent(model, *requests))
    for request, answer in zip(requests, answers, strict=True):
        np.testing.assert_array_equal(outputs(answer)["y"], request["x"])
        assert outputs(answer)["y"].shape == request["x"].shape


def test_an_output_that_follows_nothing_is_split_row_by_row_beside_one_that_does() -> None:
    plain = 'input { name: "w" data_type: TYPE_FP32 dims: [2] } output { name: "z" data_type: TYPE_FP32 dims: [2] }'
    model = config(X % -1 + plain + Y % -1 + SCATTER)
    requests = of_shapes((1, 3), (2, 1))
    whole = np.arange(6, dtype=np.float32).reshape(3, 2)
    requests = [{**requests[0], "w": whole[:1]}, {**requests[1], "w": whole[1:]}]
    answers, _ = run_batch(runner(model, Records()), sent(model, *requests))
    assert [list(outputs(answer)) for answer in answers] == [["z", "y"], ["z", "y"]]
    assert outputs(answers[1])["z"].tolist() == [[2, 3], [4, 5]]
    only, _ = run_batch(runner(model, Records()), sent(model, *requests, outputs=("y",)))
    assert [list(outputs(answer)) for answer in only] == [["y"], ["y"]]


def test_strings_may_be_ragged() -> None:
    text = X.replace("TYPE_FP32", "TYPE_STRING") % -1 + Y.replace("TYPE_FP32", "TYPE_STRING") % -1 + made(KINDS[0])
    model, instance = config(text + SCATTER), Records()
    requests = [{"x": BytesTensor.from_objects(np.array([row], object))} for row in (["a", "bc"], ["d"])]
    answers, _ = run_batch(runner(model, instance), sent(model, *requests))
    assert instance.received[0]["x"].items() == [b"a", b"bc", b"d"]
    assert [outputs(answer)["y"].items() for answer in answers] == [[b"a", b"bc"], [b"d"]]
    assert outputs(answers[0])["y"].shape == (1, 2)


def test_the_culprit_of_a_ragged_batch_fails_alone() -> None:
    model, instance = config(X % -1 + Y % -1 + made(KINDS[1]) + SCATTER), Records()
    requests = [*of_shapes((1, 3)), {"x": np.array([[13.0]], np.float32)}]
    answers, _ = run_batch(runner(model, instance), sent(model, *requests))
    assert outputs(answers[0])["y"].tolist() == [[100, 101, 102]]
    assert isinstance(answers[1], BackendError)
    assert [received[KINDS[1]].tolist() for received in instance.received] == [[3, 4], [3], [1]]


class Short(Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        return {"y": np.asarray(inputs["x"])[:-1]}


def test_an_output_with_too_few_elements_is_the_backends_fault() -> None:
    model = config(X % -1 + Y % -1 + SCATTER)
    (answer,), _ = run_batch(runner(model, Short()), sent(model, *of_shapes((1, 3))))
    assert isinstance(answer, BackendError)
    assert answer.message == ("model 'm': output 'y' has 2 elements, but by input 'x' the requests of the batch take 3")


def test_a_batch_input_of_an_input_that_was_left_out_is_the_callers_fault() -> None:
    optional = 'input { name: "w" data_type: TYPE_FP32 dims: [-1] }'
    model = config((X % -1).replace("true", "true optional: true") + optional + Y % -1 + made(KINDS[0]))
    request = {"w": np.ones((1, 2), np.float32)}
    (answer,), _ = run_batch(runner(model, Records()), sent(model, request, id="7"))
    assert isinstance(answer, InvalidArgument)
    assert answer.message.startswith("[request id: 7] input 'x' is missing")


W = 'input { name: "w" data_type: TYPE_FP32 dims: [%s] }'


@pytest.mark.parametrize(
    ("text", "widths", "joins"),
    [
        (X % -1, (), True),
        ((X % -1).replace("allow_ragged_batch: true", ""), (), False),
        (X % -1 + W % -1, (2, 2), True),
        (X % -1 + W % -1, (2, 3), False),
        (X % -1 + W % 2, (2, 2), True),
    ],
)
def test_only_ragged_inputs_may_differ_within_a_batch(text: str, widths: tuple[int, ...], joins: bool) -> None:
    requests = of_shapes((1, 3), (1, 4))
    for request, width in zip(requests, widths, strict=False):
        request["w"] = np.ones((1, width), np.float32)
    one, other = sent(config(text + Y % -1), *requests)
    assert (one.batch_key == other.batch_key) is joins


def test_a_model_without_ragged_batches_runs_the_plain_way() -> None:
    model = config((X % -1).replace("allow_ragged_batch: true", "") + Y % -1)
    assert type(runner(model, Records())) is RowsRunner


WHOLE = """platform: "tensorrt_plan"
    input { name: "x" data_type: TYPE_FP32 dims: [2] }
    input { name: "w" data_type: TYPE_INT32 dims: [3] is_shape_tensor: true }
    output { name: "y" data_type: TYPE_FP32 dims: [2] }
    output { name: "z" data_type: TYPE_INT32 dims: [3] is_shape_tensor: true }"""


def test_a_batch_has_a_shape_tensor_once_and_so_has_every_answer() -> None:
    model, instance = config(WHOLE), Records()
    w = np.array([7, 8, 9], np.int32)
    rows = [np.full((rows, 2), rows, np.float32) for rows in (1, 3, 2)]
    answers, _ = runner(model, instance).run(sent(model, *({"x": x, "w": w} for x in rows)))
    (inputs,) = instance.received
    np.testing.assert_array_equal(inputs["x"], np.concatenate(rows))
    np.testing.assert_array_equal(inputs["w"], w)
    for x, answer in zip(rows, answers, strict=True):
        assert isinstance(answer, InferResponse)
        np.testing.assert_array_equal(answer.outputs["y"], x)
        np.testing.assert_array_equal(answer.outputs["z"], w)


def test_a_missing_shape_tensor_of_the_backend_is_an_error() -> None:
    class Forgets(Records):
        def execute(self, inputs: Tensors) -> Tensors:
            return {"y": inputs["x"]}

    model = config(WHOLE)
    batch = sent(model, {"x": np.zeros((1, 2), np.float32), "w": np.zeros(3, np.int32)})
    (answer,), _ = runner(model, Forgets()).run(batch)
    assert isinstance(answer, BackendError)
    assert answer.message == "model 'm': the backend returned no output 'z'"


def test_without_a_batch_a_shape_tensor_is_like_any_other() -> None:
    assert RaggedLayout.from_json(config_to_json(config(WHOLE, max_batch_size=0))) is None
