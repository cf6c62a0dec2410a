"""Executions, driven directly: the test is the instance thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.backends.base import Instance, RequestInstance, StreamInstance, Tensors
from headrace.errors import BackendError, Cancelled, Code, HeadraceError, InvalidArgument
from headrace.executors.instance import run_batch, runner_for
from headrace.executors.output_schema import OutputSchema
from headrace.messages import dtypes
from headrace.messages.request import InferRequest
from headrace.messages.response import Answer, InferResponse
from headrace.messages.spec import Spec
from headrace.messages.tensor import BytesTensor
from headrace.messages.ticket import Batch, Padding, Ticket
from tests.core.conftest import make_ticket

SCHEMA = OutputSchema("m", "3", {"y": Spec("y", dtypes.FP32, (-1,)), "z": Spec("z", dtypes.FP32, (1,))}, True)


class Double(Instance):
    def __init__(self) -> None:
        self.calls: list[int] = []

    def execute(self, inputs: Tensors) -> Tensors:
        x = np.asarray(inputs["x"])
        self.calls.append(len(x))
        if (x == 13).any():
            raise ValueError("unlucky")
        return {"z": x[:, :1], "y": 2 * x}


def ticket(*rows: Sequence[float], outputs: tuple[str, ...] = (), id: str = "") -> Ticket:
    x = np.array(rows, np.float32)
    return make_ticket("m", {"x": x}, outputs=outputs, id=id, rows=len(x))


def outputs(answer: object) -> Mapping[str, Any]:
    assert isinstance(answer, InferResponse)
    return answer.outputs


def test_each_request_of_a_batch_gets_its_own_rows_in_one_execution() -> None:
    instance = Double()
    answers, _ = run_batch(runner_for(instance, SCHEMA), [ticket([1, 2]), ticket([3, 4], [5, 6])])
    assert instance.calls == [3]
    assert outputs(answers[0])["y"].tolist() == [[2, 4]]
    assert outputs(answers[1])["y"].tolist() == [[6, 8], [10, 12]]


@pytest.mark.parametrize("rows", [(1, 1, 1), (0, 2), (2, 1), (1,)], ids=str)
def test_outputs_are_contiguous_views_of_the_rows_of_each_request(rows: tuple[int, ...]) -> None:
    instance = Double()
    result = np.arange(2.0 * sum(rows), dtype=np.float32).reshape(-1, 2)
    instance.execute = lambda inputs: {"y": result, "z": result[:, :1]}  # type: ignore[method-assign]
    answers, _ = run_batch(runner_for(instance, SCHEMA), [ticket(*[[1.0, 2.0]] * count) for count in rows])
    given = [outputs(answer)["y"] for answer in answers]
    assert [part.shape for part in given] == [(count, 2) for count in rows]
    assert all(part.flags.c_contiguous and (not part.size or np.shares_memory(part, result)) for part in given)
    assert np.concatenate(given).tolist() == result.tolist()


def test_an_answer_carries_model_version_and_id_and_outputs_in_config_order() -> None:
    (answer,), _ = run_batch(runner_for(Double(), SCHEMA), [ticket([1, 2], id="7")])
    assert isinstance(answer, InferResponse)
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "3", "7")
    assert list(answer.outputs) == ["y", "z"]


def test_only_the_outputs_requested_are_given_in_the_order_requested() -> None:
    answers, _ = run_batch(runner_for(Double(), SCHEMA), [ticket([1, 2], outputs=("z",)), ticket([3, 4])])
    assert list(outputs(answers[0])) == ["z"]
    assert list(outputs(answers[1])) == ["y", "z"]


def test_one_request_that_makes_the_engine_raise_leaves_the_others_answered() -> None:
    answers, _ = run_batch(runner_for(Double(), SCHEMA), [ticket([1, 2]), ticket([13, 0]), ticket([3, 4])])
    assert outputs(answers[0])["y"].tolist() == [[2, 4]]
    assert isinstance(answers[1], BackendError)
    assert answers[1].message == "model 'm' failed to execute: ValueError: unlucky"
    assert outputs(answers[2])["y"].tolist() == [[6, 8]]


def test_padding_of_a_batch_that_has_failed_is_not_run_again() -> None:
    instance, padding = Double(), Padding("m", {"x": np.zeros((1, 2), np.float32)})
    answers, _ = run_batch(runner_for(instance, SCHEMA), Batch([padding, ticket([1, 2]), ticket([13, 0]), padding]))
    assert instance.calls == [4, 1, 1]
    assert outputs(answers[1])["y"].tolist() == [[2, 4]]
    assert isinstance(answers[2], BackendError)
    assert (answers[0], answers[3]) == (None, None)


@pytest.mark.parametrize("position", range(3))
def test_a_cancelled_request_is_not_executed_and_leaves_the_batch_whole(position: int) -> None:
    instance = Double()
    batch = [ticket([index, 0]) for index in range(3)]
    batch[position].cancel()
    answers, _ = run_batch(runner_for(instance, SCHEMA), batch)
    assert instance.calls == [2]
    for index, answer in enumerate(answers):
        if index == position:
            assert isinstance(answer, Cancelled)
        else:
            assert outputs(answer)["y"].tolist() == [[2 * index, 0]]


class Returns(Instance):
    def __init__(self, result: Mapping[str, Any]) -> None:
        self.result = result

    def execute(self, inputs: Tensors) -> Tensors:
        return self.result


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"y": np.zeros((1, 2), np.float32)}, "the backend returned no output 'z', only ['y']"),
        (
            {"y": np.zeros((1, 2)), "z": np.zeros((1, 1), np.float32)},
            "output 'y' is FP64, but the config says FP32",
        ),
        (
            {"y": np.zeros((2, 2), np.float32), "z": np.zeros((1, 1), np.float32)},
            "output 'y' has shape [2, 2], but the batch has 1 rows",
        ),
        (
            {"y": np.zeros((1, 2), complex), "z": np.zeros((1, 1), np.float32)},
            "dtype complex128 has no counterpart",
        ),
    ],
)
def test_an_output_that_breaks_the_contract_is_named(result: Mapping[str, Any], text: str) -> None:
    (answer,), _ = run_batch(runner_for(Returns(result), SCHEMA), [ticket([1, 2])])
    assert isinstance(answer, HeadraceError)
    assert text in answer.message


def test_the_code_of_an_error_that_the_backend_chose_is_kept() -> None:
    class Refuses(Instance):
        def execute(self, inputs: Tensors) -> Tensors:
            raise InvalidArgument("no")

    (answer,), _ = run_batch(runner_for(Refuses(), SCHEMA), [ticket([1])])
    assert isinstance(answer, HeadraceError)
    assert (answer.code, answer.message) == (Code.INVALID_ARGUMENT, "no")


class PerRequest(RequestInstance):
    def execute_requests(self, requests: Sequence[InferRequest]) -> list[InferResponse | HeadraceError]:
        answers: list[InferResponse | HeadraceError] = []
        for each in requests:
            x = np.asarray(each.inputs["x"])
            if x[0, 0] < 0:
                answers.append(InvalidArgument("negative"))
            else:
                answers.append(InferResponse({"y": x, "z": x[:, :1]}, {"sum": float(x.sum())}))
        return answers


def test_a_request_instance_fails_one_request_and_answers_the_other_with_parameters() -> None:
    answers, _ = run_batch(runner_for(PerRequest(), SCHEMA), [ticket([-1]), ticket([2], outputs=("y",))])
    assert isinstance(answers[0], InvalidArgument)
    assert isinstance(answers[1], InferResponse)
    assert answers[1].parameters == {"sum": 2.0}
    assert list(answers[1].outputs) == ["y"]


def test_a_request_instance_that_miscounts_its_answers_fails_the_batch() -> None:
    class Forgets(RequestInstance):
        def execute_requests(self, requests: Sequence[InferRequest]) -> list[InferResponse | HeadraceError]:
            return []

    answers, _ = run_batch(runner_for(Forgets(), SCHEMA), [ticket([1]), ticket([2])])
    assert [str(answer) for answer in answers] == ["model 'm': the backend gave 0 answers for 2 requests"] * 2


class Counts(StreamInstance):
    def __init__(self) -> None:
        self.closed = 0

    def stream(self, request: InferRequest) -> Iterator[InferResponse]:
        try:
            for number in range(int(np.asarray(request.inputs["x"])[0, 0])):
                yield InferResponse({"y": np.full((1, 1), number, np.float32)})
        finally:
            self.closed += 1


class Seen:
    """A sink that records the answers."""

    def __init__(self, on_send: Callable[[Ticket], None] = lambda ticket: None) -> None:
        self.all: list[tuple[Ticket, Answer, bool]] = []
        self._on_send = on_send

    def send(self, ticket: Ticket, answer: Answer, final: bool) -> None:
        self.all.append((ticket, answer, final))
        self._on_send(ticket)


def test_a_stream_gives_its_responses_in_order_and_then_ends() -> None:
    runner, seen = runner_for(Counts(), SCHEMA), Seen()
    runner.connect(seen)
    one, none = ticket([3]), ticket([0])
    answers, _ = run_batch(runner, [one, none])
    assert list(answers) == [None, None]
    assert [(r is one, outputs(answer)["y"][0, 0], final) for r, answer, final in seen.all] == [
        (True, 0.0, False),
        (True, 1.0, False),
        (True, 2.0, False),
    ]


def test_a_cancelled_stream_is_closed_between_two_responses() -> None:
    instance, one = Counts(), ticket([1000])
    runner = runner_for(instance, SCHEMA)
    runner.connect(Seen(lambda ticket: ticket.cancel()))
    answers, _ = runner.run([one])
    assert isinstance(answers[0], Cancelled)
    assert instance.closed == 1


@pytest.mark.parametrize(
    ("given_outputs", "text"),
    [
        (
            {"q": np.zeros((1, 1), np.float32)},
            "model 'm': the backend returned output 'q', but the config has only ['y', 'z']",
        ),
        ({"y": np.zeros((1, 1))}, "model 'm': output 'y' is FP64, but the config says FP32"),
    ],
)
def test_a_response_with_an_output_that_is_not_the_models_says_which_rule_it_breaks(
    given_outputs: Mapping[str, Any], text: str
) -> None:
    class Wrong(RequestInstance):
        def execute_requests(self, requests: Sequence[InferRequest]) -> list[InferResponse | HeadraceError]:
            return [InferResponse(given_outputs)]

    (answer,), _ = run_batch(runner_for(Wrong(), SCHEMA), [ticket([1])])
    assert isinstance(answer, BackendError)
    assert answer.message == text


@given(st.lists(st.lists(st.text(max_size=4), min_size=1, max_size=3), min_size=1, max_size=5))
def test_strings_of_many_requests_come_back_to_their_callers(texts: list[list[str]]) -> None:
    class Echo(Instance):
        def execute(self, inputs: Tensors) -> Tensors:
            return {"s": inputs["s"]}

    schema = OutputSchema("m", "1", {"s": Spec("s", dtypes.BYTES, (1,))}, True)
    batch = [
        make_ticket("m", {"s": BytesTensor.from_objects([[text] for text in each])}, rows=len(each)) for each in texts
    ]
    answers, _ = run_batch(runner_for(Echo(), schema), batch)
    assert [outputs(answer)["s"].items() for answer in answers] == [[t.encode() for t in each] for each in texts]


def test_an_output_reshape_is_undone() -> None:
    schema = OutputSchema("m", "1", {"y": Spec("y", dtypes.FP32, (1,), reshape=())}, True)
    (answer,), _ = run_batch(runner_for(Returns({"y": np.zeros(1, np.float32)}), schema), [ticket([1])])
    assert outputs(answer)["y"].shape == (1, 1)
