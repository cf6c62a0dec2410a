"""The answers to the requests of a batch, for everything that ``execute`` may do.

The texts are those of a real Triton (2.51), which was given the same models; where it hung or
crashed, the text is that of the rule that the model broke.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_python.harness import PythonModel, Response
from headrace_python.testing import OpenModel

ZOO = """
import threading

open_senders = []


def deeper():
    raise ValueError("too deep")


def recurse():
    recurse()


class Custom(Exception):
    pass


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.count = 0

    def out(self, array, name="OUT"):
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array)])

    def ok(self, value=1.0):
        return self.out(np.array([value], np.float32))

    def execute(self, requests):
        what = pb_utils.get_input_tensor_by_name(requests[0], "WHAT").as_numpy()[0].decode()
        return getattr(self, what)(requests)

    def fine(self, requests): return [self.ok(n) for n, _ in enumerate(requests)]
    def raises(self, requests): raise ValueError("bad value")
    def deep(self, requests): deeper()
    def recursion(self, requests): recurse()
    def custom(self, requests): raise Custom("a\\nb")
    def key(self, requests): raise KeyError("k")
    def empty(self, requests): raise RuntimeError
    def unprintable(self, requests): raise Unprintable
    def model_exception(self, requests): raise pb_utils.TritonModelException("model says no")
    def no_exception(self, requests): raise pb_utils.TritonError("no", pb_utils.TritonError.NOT_FOUND)
    def chain(self, requests):
        try:
            deeper()
        except ValueError as error:
            raise RuntimeError("outer") from error
    def exits(self, requests): raise SystemExit(3)
    def interrupt(self, requests): raise KeyboardInterrupt
    def nothing(self, requests): return None
    def a_tuple(self, requests): return tuple(self.fine(requests))
    def a_dict(self, requests): return {}
    def generator(self, requests): yield 1
    def short(self, requests): return []
    def long(self, requests): return [*self.fine(requests), self.ok()]
    def a_none(self, requests): return [*self.fine(requests)[1:], None]
    def a_string(self, requests): return ["x"] * len(requests)
    def a_tensor(self, requests): return [pb_utils.Tensor("OUT", np.zeros(1, np.float32))] * len(requests)
    def error(self, requests): return [self.ok(), pb_utils.InferenceResponse([], pb_utils.TritonError("plain"))]
    def not_found(self, requests):
        error = pb_utils.TritonError("missing", pb_utils.TritonError.NOT_FOUND)
        return [pb_utils.InferenceResponse(error=error)] * len(requests)
    def wrong_name(self, requests): return [self.out(np.zeros(1), "NOPE")] * len(requests)
    def extra_name(self, requests):
        tensors = [pb_utils.Tensor(name, np.zeros(1, np.float32)) for name in ("DEBUG", "OUT")]
        return [pb_utils.InferenceResponse(tensors)] * len(requests)
    def wrong_dtype(self, requests): return [self.ok(), self.out(np.zeros(1, np.int64))]
    def wrong_shape(self, requests): return [self.out(np.zeros((2, 3), np.float32))] * len(requests)
    def no_outputs(self, requests): return [pb_utils.InferenceResponse([])] * len(requests)
    def parameters(self, requests):
        parameters = {"a": "b", "n": 3, "t": True}
        return [pb_utils.InferenceResponse(self.ok().output_tensors(), parameters=parameters)] * len(requests)

    def sender(self, requests):
        for request in requests:
            request.get_response_sender().send(self.ok(), FINAL)
        return [None] * len(requests)
    def sender_and_none(self, requests):
        self.sender(requests)
    def sender_late(self, requests):
        senders = [request.get_response_sender() for request in requests]
        threading.Timer(0.05, lambda: [sender.send(self.ok(), FINAL) for sender in senders]).start()
    def sender_kept(self, requests):
        open_senders.extend(request.get_response_sender() for request in requests)
    def sender_dropped(self, requests):
        [request.get_response_sender() for request in requests]
        return [None] * len(requests)
    def sender_of_one(self, requests):
        requests[0].get_response_sender().send(self.ok(7), FINAL)
        return [None, *self.fine(requests)[1:]]
    def sender_of_one_and_none(self, requests):
        requests[0].get_response_sender().send(self.ok(7), FINAL)
    def sender_then_raises(self, requests):
        requests[0].get_response_sender().send(self.ok(7), FINAL)
        raise ValueError("after one answer")
    def sender_and_response(self, requests):
        requests[0].get_response_sender().send(self.ok(7), FINAL)
        return self.fine(requests)
    def sender_twice(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(self.ok(7))
        sender.send(self.ok(8))
    def sender_only_final(self, requests): requests[0].get_response_sender().send(flags=FINAL)
    def sender_nothing(self, requests): requests[0].get_response_sender().send()
    def sender_flag(self, requests): requests[0].get_response_sender().send(self.ok(), flags=5)
    def sender_string(self, requests): requests[0].get_response_sender().send("x", FINAL)

    def empties_the_list(self, requests):
        requests.clear()
        raise ValueError("emptied")
    def again(self, requests):
        self.count += 1
        if self.count % 3:
            for request in requests:
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [None] * len(requests)
        return [self.ok(self.count) for _ in requests]
    def one_again(self, requests):
        self.count += 1
        if self.count == 1:
            requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return [None, *[self.ok(self.count)] * (len(requests) - 1)]
        return [self.ok(self.count)] * len(requests)
    def again_for_ever(self, requests):
        self.count += 1
        for request in requests:
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        if self.count == 3:
            self.leave()
        return [None] * len(requests)
    def again_and_response(self, requests):
        requests[0].set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
        return self.fine(requests)
"""
PREFIX = "Failed to process the request(s) for model 'zoo_0_0', message: "


@pytest.fixture(params=["def", "async def"])
def zoo(request: pytest.FixtureRequest, python_model: OpenModel, write_model: Callable[..., Path]) -> PythonModel:
    """The zoo, with an ``execute`` of either kind."""
    iterative = {"sequence_batching": {"iterative_sequence": True, "direct": {}}}
    return python_model(write_model("zoo", ZOO.replace("def execute", f"{request.param} execute")), config=iterative)


def ask(zoo: PythonModel, what: str, number: int = 2) -> list[Response]:
    """The responses of a batch of ``number`` requests for ``what``."""
    answers = zoo.execute([zoo.request({"WHAT": np.array([what], object)}) for _ in range(number)])
    return [answer for (answer,) in answers]


def line(zoo: PythonModel, code: str) -> int:
    """The number of the line of model.py that begins with ``code``."""
    lines = Path(type(zoo.model).execute.__code__.co_filename).read_text().splitlines()
    (found,) = [number for number, text in enumerate(lines, 1) if text.strip().startswith(code)]
    return found


def file(zoo: PythonModel) -> str:
    return str(type(zoo.model).execute.__code__.co_filename)


def test_each_request_gets_the_response_at_its_place(zoo: PythonModel) -> None:
    assert [float(answer["OUT"][0]) for answer in ask(zoo, "fine", 3)] == [0, 1, 2]


def test_a_raise_fails_the_batch_with_type_message_and_frames_innermost_first(zoo: PythonModel) -> None:
    path, execute = f"1/{Path(file(zoo)).name}", line(zoo, "return getattr(self, what)")
    for answer in ask(zoo, "deep"):
        assert answer.error
        assert answer.error.code() == 1
        assert answer.error.message() == (
            f"{PREFIX}ValueError: too deep\n\nAt:\n"
            f"  {path}({line(zoo, 'raise ValueError(' + chr(34) + 'too')}): deeper\n"
            f"  {path}({line(zoo, 'def deep(')}): deep\n"
            f"  {path}({execute}): execute\n"
        )


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("raises", "ValueError: bad value\n\nAt:\n"),
        ("custom", "Custom: a\nb\n\nAt:\n"),
        ("key", "KeyError: 'k'\n\nAt:\n"),
        ("empty", "RuntimeError: <EMPTY MESSAGE>\n\nAt:\n"),
        ("unprintable", "Unprintable: <MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>\n\nAt:\n"),
        ("model_exception", "TritonModelException: model says no\n\nAt:\n"),
        ("no_exception", "TypeError: exceptions must derive from BaseException\n\nAt:\n"),
        ("chain", "RuntimeError: outer\n\nAt:\n"),
        ("empties_the_list", "ValueError: emptied\n\nAt:\n"),
        ("exits", "SystemExit: 3\n\nAt:\n"),
        ("nothing", "Expected a list in the execute return, found type '<class 'NoneType'>'."),
        ("a_tuple", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        ("a_dict", "Expected a list in the execute return, found type '<class 'dict'>'."),
        ("generator", "Expected a list in the execute return, found type '<class 'generator'>'."),
        (
            "short",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:0\n",
        ),
        (
            "long",
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
            "InferenceRequest(s) size is:2, and InferenceResponse(s) size is:3\n",
        ),
        (
            "a_none",
            "Expected an 'InferenceResponse' object in the execute function return list, "
            "found type '<class 'NoneType'>'.",
        ),
        (
            "a_string",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'str'>'.",
        ),
        (
            "again_and_response",
            "Expected a None object in the execute function return list for reschduled request, found type '<class '",
        ),
        (
            "sender_only_final",
            "TritonModelException: Unable to send response. Non-decoupled model cannot send complete final before "
            "sending a response.\n\nAt:\n",
        ),
        (
            "sender_nothing",
            "TritonModelException: Inference Response object must be provided when the response flags is set to zero."
            "\n\nAt:\n",
        ),
        ("sender_flag", "TritonModelException: Unable to send response. Unsupported flag provided.\n\nAt:\n"),
    ],
)
def test_invalid_results_fail_the_whole_batch_in_tritons_words(zoo: PythonModel, what: str, text: str) -> None:
    errors = [answer.error for answer in ask(zoo, what)]
    assert [error.message()[: len(PREFIX + text)] for error in errors if error] == [PREFIX + text] * 2
    assert [error.code() for error in errors if error] == [1, 1]
    assert float(ask(zoo, "fine")[0]["OUT"][0]) == 0


def test_the_frames_of_an_endless_recursion_are_cut(zoo: PythonModel) -> None:
    (answer,) = ask(zoo, "recursion", 1)
    assert answer.error
    assert answer.error.message().startswith(f"{PREFIX}RecursionError: maximum recursion depth exceeded")
    assert "more\n" in answer.error.message()
    assert len(answer.error.message()) < 8192


@pytest.mark.parametrize(("what", "code", "text"), [("error", 1, "plain"), ("not_found", 2, "missing")])
def test_an_error_of_a_response_keeps_its_text_and_code(zoo: PythonModel, what: str, code: int, text: str) -> None:
    error = ask(zoo, what)[1].error
    assert error
    assert (error.code(), error.message()) == (code, text)


def test_an_error_of_one_response_does_not_affect_the_other(zoo: PythonModel) -> None:
    assert float(ask(zoo, "error")[0]["OUT"][0]) == 1


def test_an_output_of_another_dtype_is_an_error_of_that_response_only(zoo: PythonModel) -> None:
    right, wrong = ask(zoo, "wrong_dtype")
    assert right["OUT"].tolist() == [1]
    assert wrong.error
    assert wrong.error.message() == "model 'zoo': output 'OUT' is INT64, but the config says FP32"


def test_a_misnamed_output_is_an_error_that_lists_the_known(zoo: PythonModel) -> None:
    error = ask(zoo, "wrong_name")[0].error
    assert error
    assert error.message() == "model 'zoo': the backend returned output 'NOPE', but the config has only ['OUT']"


def test_an_undeclared_output_is_dropped(zoo: PythonModel) -> None:
    assert list(ask(zoo, "extra_name")[0].outputs) == ["OUT"]


def test_the_shape_of_an_output_is_taken_as_it_is(zoo: PythonModel) -> None:
    assert ask(zoo, "wrong_shape")[0]["OUT"].shape == (2, 3)


def test_a_response_may_have_no_outputs(zoo: PythonModel) -> None:
    assert ask(zoo, "no_outputs")[0].outputs == {}


def test_parameters_of_a_response_reach_the_caller(zoo: PythonModel) -> None:
    assert ask(zoo, "parameters")[0].parameters == {"a": "b", "n": 3, "t": True}


@pytest.mark.parametrize("what", ["sender", "sender_and_none", "sender_late"])
def test_a_response_sender_answers_in_place_of_the_return_value(zoo: PythonModel, what: str) -> None:
    assert [float(answer["OUT"][0]) for answer in ask(zoo, what)] == [1, 1]


def test_one_request_of_a_batch_may_be_answered_by_its_sender(zoo: PythonModel) -> None:
    assert [float(answer["OUT"][0]) for answer in ask(zoo, "sender_of_one")] == [7, 1]


def test_none_alone_is_no_answer_to_a_request_without_a_sender(zoo: PythonModel) -> None:
    answered, other = ask(zoo, "sender_of_one_and_none")
    assert float(answered["OUT"][0]) == 7
    assert other.error
    assert other.error.message() == f"{PREFIX}Expected a list in the execute return, found type '<class 'NoneType'>'."


def test_an_exception_does_not_replace_a_response_that_was_sent(zoo: PythonModel) -> None:
    answered, other = ask(zoo, "sender_then_raises")
    assert float(answered["OUT"][0]) == 7
    assert other.error
    assert "ValueError: after one answer" in other.error.message()


def test_a_second_response_is_dropped_and_logged(zoo: PythonModel, caplog: pytest.LogCaptureFixture) -> None:
    assert [float(answer["OUT"][0]) for answer in ask(zoo, "sender_and_response")] == [7, 1]
    assert "returned a response to a request that its response sender has answered" in caplog.text


def test_a_second_response_is_refused_to_the_model_and_the_first_stands(zoo: PythonModel) -> None:
    answered, other = ask(zoo, "sender_twice")
    assert float(answered["OUT"][0]) == 7
    assert other.error
    assert "Non-decoupled model cannot send more than one response." in other.error.message()


def test_a_dropped_sender_ends_its_request_with_an_error(zoo: PythonModel) -> None:
    for answer in ask(zoo, "sender_dropped"):
        assert answer.error
        assert "released the response sender without a response" in answer.error.message()


def test_a_rescheduled_batch_is_executed_again_until_it_is_answered(zoo: PythonModel) -> None:
    assert [float(answer["OUT"][0]) for answer in ask(zoo, "again")] == [3, 3]


def test_only_the_rescheduled_requests_of_a_batch_are_executed_again(zoo: PythonModel) -> None:
    assert [float(answer["OUT"][0]) for answer in ask(zoo, "one_again", 3)] == [2, 1, 1]


def test_a_rescheduled_request_is_not_executed_again_after_its_client_disconnects(zoo: PythonModel) -> None:
    request = zoo.request({"WHAT": np.array(["again_for_ever"], object)})
    zoo.model.leave = lambda: zoo.cancel(request)
    ((answer,),) = zoo.execute([request])
    assert answer.error
    assert answer.error.code() == 7
    assert zoo.model.count == 3


def test_a_model_without_execute_fails_requests(python_model: OpenModel, write_model: Callable[..., Path]) -> None:
    model = python_model(write_model("lazy", "class TritonPythonModel: pass"))
    error = model.infer({"WHAT": np.array(["x"], object)}).error
    assert error
    assert error.message().endswith("message: Python model lazy_0_0 does not implement `execute` method.")


def test_a_request_without_outputs_gets_all(python_model: OpenModel, write_model: Callable[..., Path]) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            self.requested = [request.requested_output_names() for request in requests]
            return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    config = "".join(f'output {{ name: "{name}" data_type: TYPE_FP32 dims: [1] }}\n' for name in "AB")
    model = python_model(write_model("asks", code, config))
    model.execute([model.request({}), model.request({}, outputs=["B"])])
    assert [set(names) for names in model.model.requested] == [{"A", "B"}, {"B"}]


DECOUPLED = """
import threading
from asyncio import Event, sleep

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def out(self, value):
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))])

    def execute(self, requests):
        what = pb_utils.get_input_tensor_by_name(requests[0], "WHAT").as_numpy()[0].decode()
        return getattr(self, what)(requests)

    def three(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for n in range(3):
                sender.send(self.out(n))
            sender.send(flags=FINAL)
    def backwards(self, requests):
        senders = [request.get_response_sender() for request in requests]
        def work():
            for n in range(2):
                for sender in reversed(senders):
                    sender.send(self.out(n), FINAL if n else 0)
        threading.Thread(target=work).start()
    def no_final(self, requests):
        for request in requests:
            request.get_response_sender().send(self.out(1))
    def silent(self, requests): pass
    def returns(self, requests): return [self.out(1) for _ in requests]
    def raises_midway(self, requests):
        requests[0].get_response_sender().send(self.out(1))
        requests[1].get_response_sender().send(self.out(1), FINAL)
        raise ValueError("midway")
    def after_final(self, requests):
        sender = requests[0].get_response_sender()
        sender.send(flags=FINAL)
        sender.send(self.out(1))
    def error_midway(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(self.out(1))
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("stop")), FINAL)
"""


@pytest.fixture(params=["def", "async def"])
def stream(request: pytest.FixtureRequest, python_model: OpenModel, write_model: Callable[..., Path]) -> PythonModel:
    config = 'model_transaction_policy { decoupled: true } input { name: "WHAT" data_type: TYPE_STRING dims: [1] }\n'
    config += 'output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }'
    code = DECOUPLED.replace("def execute", f"{request.param} execute")
    return python_model(write_model("stream", code, config))


def run(stream: PythonModel, what: str, number: int = 2) -> list[list[Any]]:
    """Per request of a batch, the values and the error texts of its responses."""
    answers = stream.execute([stream.request({"WHAT": np.array([what], object)}) for _ in range(number)])
    return [
        [each.error.message() if each.error else float(each["OUT"][0]) for each in responses] for responses in answers
    ]


def test_a_decoupled_model_sends_any_number_of_responses(stream: PythonModel) -> None:
    assert run(stream, "three") == [[0, 1, 2], [0, 1, 2]]


def test_another_thread_may_send_responses_in_any_order_of_requests(stream: PythonModel) -> None:
    assert run(stream, "backwards") == [[0, 1], [0, 1]]


def test_a_sender_dropped_without_final_ends_its_request(stream: PythonModel) -> None:
    assert run(stream, "no_final") == [[1], [1]]


def test_a_request_dropped_unanswered_ends_without_a_response(stream: PythonModel) -> None:
    assert run(stream, "silent") == [[], []]


def test_a_decoupled_model_that_returns_something_fails_the_batch(stream: PythonModel) -> None:
    text = (
        "Failed to process the request(s) for model 'stream_0_0', message: Python model 'stream_0_0' is using the "
        "decoupled mode and the execute function must return None."
    )
    assert run(stream, "returns") == [[text], [text]]


def test_a_raise_ends_the_requests_that_are_open_and_no_other(stream: PythonModel) -> None:
    first, second = run(stream, "raises_midway")
    assert first[0] == 1
    assert "ValueError: midway" in first[1]
    assert second == [1]


def test_a_send_after_final_raises_in_the_model(stream: PythonModel) -> None:
    ended, open_one = run(stream, "after_final")
    assert ended == []
    assert "TritonModelException: Unable to send response. Response sender has been closed." in open_one[0]


def test_an_error_may_follow_responses(stream: PythonModel) -> None:
    assert run(stream, "error_midway") == [[1, "stop"], [1, "stop"]]


def test_async_decoupled_batches_overlap(python_model: OpenModel, write_model: Callable[..., Path]) -> None:
    code = """
    import asyncio
    class TritonPythonModel:
        def initialize(self, args):
            self.opened = asyncio.Event()
        async def execute(self, requests):
            for request in requests:
                sender = request.get_response_sender()
                if pb_utils.get_input_tensor_by_name(request, "WHAT").as_numpy()[0] == b"wait":
                    await self.opened.wait()
                else:
                    self.opened.set()
                sender.send(flags=1)
    """
    config = 'model_transaction_policy { decoupled: true } input { name: "WHAT" data_type: TYPE_STRING dims: [1] }\n'
    model = python_model(write_model("meets", code, config + 'output { name: "OUT" data_type: TYPE_FP32 dims: [1] }'))
    first = threading.Thread(target=model.stream, args=({"WHAT": np.array(["wait"], object)},))
    first.start()
    assert model.stream({"WHAT": np.array(["open"], object)}) == []
    first.join(10)
    assert not first.is_alive()


def test_requests_of_a_batch_are_freed_once_they_are_answered(zoo: PythonModel) -> None:
    array = np.array(["fine"], object)
    request = zoo.request({"WHAT": array})
    tensor = request.inputs["WHAT"]
    zoo.execute([request])
    del request
    gc.collect()
    holders = [each for each in gc.get_referrers(tensor) if type(each).__name__ == "Tensor"]
    assert holders == []
