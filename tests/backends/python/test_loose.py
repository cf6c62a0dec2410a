"""Models that Triton accepts although they break their config or a convention: ``headrace serve`` serves them, too.

Every test of the served repository runs twice: with each instance in a process of its own, and in a thread.
"""

from __future__ import annotations

import queue
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http

INT_CONFIG = """
input { name: "IN" data_type: TYPE_INT32 dims: [-1] }
output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
"""
TEXT_CONFIG = INT_CONFIG.replace("TYPE_INT32", "TYPE_STRING")
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
#: Sends an error or a response for each string of the input; then the end.
ERRS = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for word in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy():
                if word == b"wrong":
                    error = pb_utils.TritonError(b"no such thing", pb_utils.TritonError.NOT_FOUND)
                    sender.send(pb_utils.InferenceResponse(error=error))
                else:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([word], object))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
#: Sends 1, and 2 when the request is cancelled.
STUBBORN = """
import threading, time

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()
    def answer(self, sender):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([1], np.int32))]))
        while not sender.is_cancelled():
            time.sleep(0.001)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([2], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
#: Cancels the request to the other model after the first response, and reads the rest.
ENOUGH = """
class TritonPythonModel:
    def execute(self, requests):
        inner = pb_utils.InferenceRequest(
            model_name="stubborn", requested_output_names=["OUT"], inputs=requests[0].inputs()
        )
        answers = inner.exec(decoupled=True)
        found = [next(answers)]
        answers.cancel()
        found += answers
        assert not any(answer.has_error() for answer in found)
        numbers = [tensor.as_numpy() for answer in found for tensor in answer.output_tensors()]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.concatenate(numbers))]) for _ in requests]
"""
#: Its output is not of the config's type, nor of its dims; who asks it by BLS passes on what it got.
LOOSE = """
class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.arange(3, dtype=np.float64) / 2)]) for _ in requests
        ]
"""
PASSES_ON = """
class TritonPythonModel:
    def execute(self, requests):
        inner = pb_utils.InferenceRequest(
            model_name=b"loose", requested_output_names=[b"OUT"], inputs=requests[0].inputs(), request_id=b"1"
        )
        answer = inner.exec()
        if answer.has_error():
            raise pb_utils.TritonModelException(answer.error().message())
        return [pb_utils.InferenceResponse(answer.output_tensors()) for _ in requests]
"""


@pytest.fixture(scope="module", params=["process", "thread"])
def server(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    write_python: Callable[..., Path],
    keep_serving: Callable[..., Any],
) -> Any:
    root = tmp_path_factory.mktemp("models")
    write_python(root, "errs", ERRS, DECOUPLED + TEXT_CONFIG)
    write_python(root, "stubborn", STUBBORN, DECOUPLED + INT_CONFIG)
    write_python(root, "enough", ENOUGH, INT_CONFIG)
    write_python(root, "loose", LOOSE, INT_CONFIG)
    write_python(root, "passes_on", PASSES_ON, INT_CONFIG)
    return keep_serving(f"--model-repository={root}", f"--backend-config=python,isolation={request.param}")


@pytest.fixture
def client(server: Any) -> Iterator[http.InferenceServerClient]:
    with http.InferenceServerClient(f"127.0.0.1:{server.http}") as found:
        yield found


def tensors(module: Any, array: np.ndarray[Any, Any]) -> list[Any]:
    made = module.InferInput("IN", list(array.shape), "BYTES" if array.dtype.kind == "O" else "INT32")
    made.set_data_from_numpy(array)
    return [made]


def test_an_error_that_is_not_the_last_response_arrives_in_its_place(server: Any) -> None:
    got: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as stream:
        stream.start_stream(lambda result, error: got.put((result, error)))
        words = np.array(["a", "wrong", "b", "wrong", "wrong"], np.object_)
        stream.async_stream_infer("errs", tensors(grpc, words), enable_empty_final_response=True)
        found: list[object] = []
        for _ in range(6):
            result, error = got.get(timeout=30)
            found.append(error.message() if error is not None else result.as_numpy("OUT"))
    assert found[-1] is None
    assert [each if isinstance(each, str) else each.item().decode() for each in found[:-1]] == [  # type: ignore[attr-defined]
        "a",
        "no such thing",
        "b",
        "no such thing",
        "no such thing",
    ]


@pytest.mark.parametrize("model", ["loose", "passes_on"])
def test_an_output_of_another_type_and_other_dims_is_passed_on_as_it_is(
    server: Any, client: http.InferenceServerClient, model: str, wait_until: Callable[..., None]
) -> None:
    sent = tensors(http, np.zeros(1, np.int32))
    for _ in range(2):
        answer = client.infer(model, sent)
        assert answer.get_output("OUT")["datatype"] == "FP64"
        np.testing.assert_array_equal(answer.as_numpy("OUT"), [0, 0.5, 1])
    message = f"model '{model}': output 'OUT' is FP64, but the config says INT32; it is passed on as it is"
    wait_until(lambda: message in server.log, "the log says it")
    assert server.log.count(message) == 1


def test_a_model_that_ignores_cancel_still_delivers(client: http.InferenceServerClient) -> None:
    answer = client.infer("enough", tensors(http, np.zeros(1, np.int32)))
    assert answer.as_numpy("OUT").tolist() == [1, 2]


def test_the_command_line_of_a_models_process_has_nothing_of_ours(
    tmp_path: Path, write_python: Callable[..., Path], run_headrace: Callable[..., Any]
) -> None:
    code = """
    import sys

    class TritonPythonModel:
        @staticmethod
        def auto_complete_config(config):
            config.add_output({"name": "OUT", "data_type": "TYPE_STRING", "dims": [len(sys.argv)]})
            return config
        def execute(self, requests):
            out = pb_utils.Tensor("OUT", np.array(sys.argv, object))
            return [pb_utils.InferenceResponse([out]) for _ in requests]
    """
    write_python(tmp_path, "m", code, 'input { name: "IN" data_type: TYPE_INT32 dims: [1] }')
    server = run_headrace(f"--model-repository={tmp_path}").wait_until_ready()
    with http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        assert client.infer("m", tensors(http, np.zeros(1, np.int32))).as_numpy("OUT").tolist() == [b""]
        assert client.get_model_config("m")["output"][0]["dims"] == [1]
    server.stop()


def test_a_model_without_its_file_is_named_in_the_log_as_triton_does(
    tmp_path: Path, write_python: Callable[..., Path], run_headrace: Callable[..., Any]
) -> None:
    file = write_python(tmp_path, "m", "", INT_CONFIG) / "1" / "model.py"
    file.unlink()
    server = run_headrace(f"--model-repository={tmp_path}")
    message = f"Python model file not found in '{file}'"
    server.wait_for_line(re.escape(f"Failed to preinitialize Python stub: {message}"))
