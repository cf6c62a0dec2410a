"""Padded batches: the instance gets tensors with the sizes of the buckets, and callers see no padding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.base import Call, DeferredInstance, Instance, RequestInstance, StreamInstance, Tensors
from headrace.config.config_json import config_to_json
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import BackendError, ConfigError, HeadraceError
from headrace.executors.instance import run_batch, runner_for, shaping_of
from headrace.executors.output_schema import OutputSchema
from headrace.executors.runner import LATER, Runner
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import UNREAD, Ticket
from headrace.models.signature import Signature
from tests.core.conftest import make_ticket

X = 'input { name: "x" data_type: TYPE_FP32 dims: [-1] }'
Y = 'output { name: "y" data_type: TYPE_FP32 dims: [-1] }'
PAD = {"input": "x", "axis": 0, "buckets": [4, 8], "value": -1}
LENGTH, MASK = {"name": "n", "data_type": "TYPE_INT32"}, {"name": "there", "data_type": "TYPE_FP32"}


class Records(Instance):
    """Records its inputs. ``y`` is ``x``, or the result of ``answer`` for its inputs."""

    def __init__(self, answer: Any = lambda inputs: {"y": inputs["x"]}) -> None:
        self.received: list[Mapping[str, Any]] = []
        self._answer = answer

    def execute(self, inputs: Tensors) -> Tensors:
        self.received.append(inputs)
        outputs: Tensors = self._answer(inputs)
        return outputs


def config(parameter: Mapping[str, Any], text: str = X + Y, max_batch_size: int = 8) -> ModelConfig:
    model = text_format.Parse(f'name: "m" max_batch_size: {max_batch_size} {text}', ModelConfig())
    model.parameters["padding"].string_value = json.dumps(parameter)
    return model


def runner(model: ModelConfig, instance: Any) -> Runner:
    signature = Signature("m", model)
    schema = OutputSchema("m", "1", signature.outputs, signature.batched)
    return runner_for(instance, schema, shaping_of(config_to_json(model)))


def sent(model: ModelConfig, *arrays: Any) -> list[Ticket]:
    tickets = [make_ticket("m", {"x": array}) for array in arrays]
    for ticket in tickets:
        Signature("m", model).check(ticket)
    return tickets


def row(*values: float) -> Any:
    return np.array([values], np.float32)


def y(answer: object) -> Any:
    assert isinstance(answer, InferResponse), answer
    return answer.outputs["y"]


def test_inputs_are_padded_with_the_value_and_outputs_cut_to_the_sent_sizes() -> None:
    model, instance = config({"pad": [PAD]}), Records()
    answers, _ = run_batch(runner(model, instance), sent(model, row(1, 2), row(3), row(4, 5, 6, 7)))
    assert instance.received[0]["x"].tolist() == [[1, 2, -1, -1], [3, -1, -1, -1], [4, 5, 6, 7]]
    assert [y(answer).tolist() for answer in answers] == [[[1, 2]], [[3]], [[4, 5, 6, 7]]]


def test_padding_rows_of_a_batch_are_in_no_answer() -> None:
    model, instance = config({"pad_batch_to": [1, 4, 8]}), Records()
    answers, _ = run_batch(runner(model, instance), sent(model, row(1, 2), np.array([[3, 4], [5, 6]], np.float32)))
    assert instance.received[0]["x"].tolist() == [[1, 2], [3, 4], [5, 6], [0, 0]]
    assert [y(answer).tolist() for answer in answers] == [[[1, 2]], [[3, 4], [5, 6]]]


def test_lengths_and_a_mask_mark_the_unpadded_elements() -> None:
    model = config({"pad": [{**PAD, "length": LENGTH, "mask": MASK}], "pad_batch_to": [4, 8]})
    instance = Records()
    run_batch(runner(model, instance), sent(model, row(1, 2), np.array([[3], [5]], np.float32)))
    (inputs,) = instance.received
    assert (inputs["n"].tolist(), inputs["n"].dtype) == ([2, 1, 1, 0], np.int32)
    assert inputs["there"].tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert inputs["there"].dtype == np.float32


def test_input_that_has_its_size_is_not_copied() -> None:
    model, instance = config({"pad": [PAD], "pad_batch_to": [1, 8]}), Records()
    (ticket,) = sent(model, row(1, 2, 3, 4))
    run_batch(runner(model, instance), [ticket])
    assert instance.received[0]["x"] is ticket.request.inputs["x"]


@given(
    st.lists(st.tuples(st.integers(1, 2), st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=4),
    st.booleans(),
)
def test_each_answer_equals_that_of_the_request_alone_and_unpadded(
    shapes: list[tuple[int, int, int]], fills_rows: bool
) -> None:
    text = (X + Y).replace("[-1]", "[-1, -1]")
    pads = [{"input": "x", "axis": axis, "buckets": [4, 6]} for axis in (0, 1)]
    rows = {"pad_batch_to": [2, 8]} if fills_rows else {}
    model, instance = config({"pad": pads, **rows}, text), Records(lambda inputs: {"y": 2 * inputs["x"] + 1})
    arrays = [np.random.default_rng(n).random(shape, np.float32) for n, shape in enumerate(shapes)]
    batches: dict[object, list[Ticket]] = {}
    for ticket in sent(model, *arrays):
        batches.setdefault(ticket.batch_key, []).append(ticket)
    for batch in batches.values():
        answers, _ = run_batch(runner(model, instance), batch)
        for ticket, answer in zip(batch, answers, strict=True):
            np.testing.assert_array_equal(y(answer), 2 * np.asarray(ticket.request.inputs["x"]) + 1)
    assert {padded_inputs["x"].shape[1:] for padded_inputs in instance.received} <= {(4, 4), (4, 6), (6, 4), (6, 6)}
    assert not fills_rows or {padded_inputs["x"].shape[0] for padded_inputs in instance.received} <= {2, 8}


def test_an_output_that_does_not_follow_is_left_as_it_is() -> None:
    model = config({"pad": [PAD]})
    instance = Records(lambda inputs: {"y": inputs["x"][:, :3]})
    (answer,), _ = run_batch(runner(model, instance), sent(model, row(1, 2)))
    assert y(answer).tolist() == [[1, 2, -1]]


def test_an_output_that_does_not_follow_its_declared_pad_is_a_backend_error() -> None:
    model = config({"pad": [PAD], "unpad": [{"output": "y", "axis": 0, "input": "x"}]})
    instance = Records(lambda inputs: {"y": inputs["x"][:, :3]})
    (answer,), _ = run_batch(runner(model, instance), sent(model, row(1, 2)))
    assert isinstance(answer, BackendError)
    assert answer.message == (
        "model 'm': output 'y' has shape [1, 3], but its axis 0 is to follow input 'x', which was padded to 4"
    )


def test_rows_of_strings_are_filled_with_empty_ones() -> None:
    text = X.replace("FP32", "STRING") + Y.replace("FP32", "STRING")
    model, instance = config({"pad_batch_to": [4, 8]}, text), Records()
    (answer,), _ = run_batch(
        runner(model, instance), sent(model, BytesTensor.from_objects(np.array([["a", "bc"]], object)))
    )
    assert instance.received[0]["x"].items() == [b"a", b"bc", *[b""] * 6]
    assert y(answer).items() == [b"a", b"bc"]


def test_a_model_without_a_batch_axis_is_padded_too() -> None:
    model, instance = config({"pad": [PAD]}, max_batch_size=0), Records()
    (answer,), _ = run_batch(runner(model, instance), sent(model, np.array([1, 2], np.float32)))
    assert instance.received[0]["x"].tolist() == [1, 2, -1, -1]
    assert y(answer).tolist() == [1, 2]


class PerRequest(RequestInstance):
    def __init__(self) -> None:
        self.received: list[Mapping[str, Any]] = []

    def execute_requests(self, requests: Sequence[InferRequest]) -> Sequence[InferResponse | HeadraceError]:
        self.received += [request.inputs for request in requests]
        return [InferResponse({"y": request.inputs["x"]}) for request in requests]  # type: ignore[dict-item]


class OneByOne(StreamInstance):
    """Each request's rows, doubled and as they are, as two responses."""

    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        x: Any = request.inputs["x"]
        yield InferResponse({"y": 2 * x})
        yield InferResponse({"y": x})


class Later(DeferredInstance):
    """Answers when the test calls it."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def accept(self, calls: Sequence[Call]) -> None:
        self.calls += calls


class Heard:
    def __init__(self) -> None:
        self.answers: list[tuple[Any, bool]] = []

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        self.answers.append((answer, final))


def test_a_request_instance_gets_each_request_padded() -> None:
    model, instance = config({"pad": [{**PAD, "length": LENGTH, "mask": MASK}]}), PerRequest()
    answers, _ = run_batch(runner(model, instance), sent(model, row(1, 2), row(3)))
    assert [inputs["x"].tolist() for inputs in instance.received] == [[[1, 2, -1, -1]], [[3, -1, -1, -1]]]
    assert [inputs["n"].tolist() for inputs in instance.received] == [[2], [1]]
    assert instance.received[1]["there"].tolist() == [[1, 0, 0, 0]]
    assert [y(answer).tolist() for answer in answers] == [[[1, 2]], [[3]]]


def test_every_response_of_a_stream_is_cut() -> None:
    model, heard = config({"pad": [PAD]}), Heard()
    padded = runner(model, OneByOne())
    padded.connect(heard)
    (answer,), _ = padded.run(sent(model, row(1, 2)))
    assert answer is None
    assert [(y(response).tolist(), final) for response, final in heard.answers] == [
        ([[2, 4]], False),
        ([[1, 2]], False),
    ]


def test_a_late_answer_is_cut_and_its_request_is_freed() -> None:
    model, heard, instance = config({"pad": [PAD]}), Heard(), Later()
    padded = runner(model, instance)
    padded.connect(heard)
    answers, _ = padded.run(sent(model, row(1, 2)))
    assert answers == [LATER]
    call = instance.calls.pop()
    call.send(InferResponse({"y": call.request.inputs["x"]}))  # type: ignore[dict-item]
    assert [(y(answer).tolist(), final) for answer, final in heard.answers] == [([[1, 2]], True)]
    assert vars(padded)["_requests"] == {}


def test_a_batch_of_requests_is_filled_up_by_a_padding_request() -> None:
    pad = {**PAD, "length": LENGTH, "mask": MASK}
    model, instance = config({"pad": [pad], "pad_batch_to": [1, 4, 8]}), PerRequest()
    tickets = sent(model, row(1, 2), row(3))
    answers, _ = run_batch(runner(model, instance), tickets)
    assert len(answers) == len(tickets)
    assert [y(answer).tolist() for answer in answers] == [[[1, 2]], [[3]]]
    *_, filling = instance.received
    assert sum(len(inputs["x"]) for inputs in instance.received) == 4
    assert filling["x"].tolist() == [[-1] * 4] * 2
    assert (filling["n"].tolist(), filling["n"].dtype) == ([0, 0], np.int32)
    assert filling["there"].tolist() == [[0] * 4] * 2
    run_batch(runner(model, instance), sent(model, row(5)))
    assert len(instance.received) == 4  # a bucket of one row is full with one


def test_answer_to_the_padding_request_is_dropped() -> None:
    model, heard, instance = config({"pad_batch_to": [4, 8]}), Heard(), Later()
    padded = runner(model, instance)
    padded.connect(heard)
    answers, _ = padded.run(sent(model, row(1, 2)))
    assert answers == [LATER]
    assert len(padded.unanswered) == 2
    call, filling = instance.calls
    for _ in range(2 * UNREAD):  # no client reads it, and the model does not wait
        filling.send(InferResponse({"y": row(0)}), final=False)
    filling.send(None)
    assert heard.answers == []
    call.send(InferResponse({"y": call.request.inputs["x"]}))  # type: ignore[dict-item]
    assert [(y(answer).tolist(), final) for answer, final in heard.answers] == [([[1, 2]], True)]
    assert not padded.unanswered
    assert vars(padded)["_requests"] == {}


def test_streams_of_one_request_after_the_other_are_not_filled_up() -> None:
    with pytest.raises(ConfigError, match="pad_batch_to is for backends that are given batches, and this one"):
        runner(config({"pad": [PAD], "pad_batch_to": [8]}), OneByOne())


STRINGS = (X + Y).replace("FP32", "STRING")


def strings(*rows: Sequence[str]) -> BytesTensor:
    return BytesTensor.from_objects(np.array(rows, object))


@pytest.mark.parametrize(("value", "filling"), [({}, b""), ({"value": "\u00b7"}, b"\xc2\xb7")])
def test_strings_are_filled_with_the_text_and_cut_again(value: Mapping[str, str], filling: bytes) -> None:
    pad = {"input": "x", "axis": 0, "buckets": [3], "length": LENGTH, **value}
    model, instance = config({"pad": [pad], "pad_batch_to": [4, 8]}, STRINGS), Records()
    answers, _ = run_batch(runner(model, instance), sent(model, strings(["a", "bc"]), strings(["d"], ["e"])))
    (inputs,) = instance.received
    rows = [[b"a", b"bc", filling], [b"d", filling, filling], [b"e", filling, filling], [filling] * 3]
    assert inputs["x"].to_objects().tolist() == rows
    assert inputs["n"].tolist() == [2, 1, 1, 0]
    assert [y(answer).to_objects().tolist() for answer in answers] == [[[b"a", b"bc"]], [[b"d"], [b"e"]]]


def test_strings_of_a_request_instance_are_padded_too() -> None:
    pad = {"input": "x", "axis": 0, "buckets": [2], "value": "-"}
    model, instance = config({"pad": [pad], "pad_batch_to": [2, 8]}, STRINGS), PerRequest()
    (answer,), _ = run_batch(runner(model, instance), sent(model, strings(["a"])))
    assert [inputs["x"].to_objects().tolist() for inputs in instance.received] == [[[b"a", b"-"]], [[b"-", b"-"]]]
    assert y(answer).to_objects().tolist() == [[b"a"]]
