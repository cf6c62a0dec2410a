"""Python models as users write them, served by ``headrace serve``, with the stock client.

The models are those of the public documentation of Triton's Python backend, written anew. Every test
runs twice: with each instance in a process of its own, and in a thread of the server.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

ADD_SUB_CONFIG = "".join(
    f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: [4] }}\n'
    for kind, names in (("input", ("INPUT0", "INPUT1")), ("output", ("OUTPUT0", "OUTPUT1")))
    for name in names
)
ADD_SUB = """
import json

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        described = pb_utils.get_output_config_by_name(config, "OUTPUT0")
        self.dtype = pb_utils.triton_string_to_numpy(described["data_type"])
    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1").as_numpy()
            tensors = [
                pb_utils.Tensor("OUTPUT0", (a + b).astype(self.dtype)),
                pb_utils.Tensor("OUTPUT1", (a - b).astype(self.dtype)),
            ]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
UPPER = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            words = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            out = np.array([word.upper() for word in words.ravel()], np.object_).reshape(words.shape)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]))
        return responses
"""
UPPER_CONFIG = "".join(
    f'{kind} {{ name: "{name}" data_type: TYPE_STRING dims: [-1] }}\n'
    for kind, name in (("input", "IN"), ("output", "OUT"))
)
#: N responses to each element, sent by a thread per request.
REPEAT = """
import threading

class TritonPythonModel:
    def initialize(self, args):
        self.threads = []
    def execute(self, requests):
        for request in requests:
            thread = threading.Thread(target=self.answer, args=(request.get_response_sender(), request))
            self.threads.append(thread)
            thread.start()
    def answer(self, sender, request):
        for value in pb_utils.get_input_tensor_by_name(request, "IN").as_numpy():
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    def finalize(self):
        for thread in self.threads:
            thread.join()
"""
INT_CONFIG = """
input { name: "IN" data_type: TYPE_INT32 dims: [-1] }
output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }\n"
SQUARE = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*[self.answer(request) for request in requests])
    async def answer(self, request):
        sender = request.get_response_sender()
        count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
        for _ in range(count):
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([count], np.int32))]))
            await asyncio.sleep(0)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DESCRIBE = """
import json

class TritonPythonModel:
    def initialize(self, args):
        self.args = dict(args)
    def execute(self, requests):
        responses = []
        for request in requests:
            described = {
                "args": self.args,
                "id": request.request_id(),
                "correlation_id": request.correlation_id(),
                "parameters": json.loads(request.parameters()),
                "outputs": sorted(request.requested_output_names()),
                "batch": len(requests),
            }
            out = np.array([json.dumps(described)], np.object_)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)], parameters={"described": True}))
        return responses
"""
DESCRIBE_CONFIG = """
input { name: "IN" data_type: TYPE_INT32 dims: [-1] optional: true }
output { name: "OUT" data_type: TYPE_STRING dims: [1] }
parameters { key: "colour" value { string_value: "blue" } }
"""
HELPED = """
import helper
from .helper import NAME
from words import greeting

class TritonPythonModel:
    def execute(self, requests):
        import lazy
        text = "|".join([helper.NAME, NAME, greeting(), lazy.NAME])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([text], np.object_))]) for _ in requests]
"""
BLS = """
class TritonPythonModel:
    EXECUTE
        responses = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="add_sub", requested_output_names=["OUTPUT0"], inputs=request.inputs()
            )
            answer = CALL
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
            else:
                total = pb_utils.get_output_tensor_by_name(answer, "OUTPUT0").as_numpy()
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", total)]))
        return responses
"""
#: Asks the model that the request names, which may be one that waits for this.
ASKS = """
class TritonPythonModel:
    EXECUTE
        responses = []
        for request in requests:
            path = pb_utils.get_input_tensor_by_name(request, "PATH").as_numpy()
            if len(path):
                inner = pb_utils.InferenceRequest(
                    model_name=path[0].decode(),
                    requested_output_names=["END"],
                    inputs=[pb_utils.Tensor("PATH", path[1:])],
                )
                answer = CALL
                responses.append(answer)
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("END", np.ones(1, np.int32))]))
        return responses
"""
#: Always gives the same array.
CONSTANT = """
ALWAYS = np.arange(3, dtype=np.int32)

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", ALWAYS)]) for _ in requests]
"""
#: Writes to the outputs of another model.
SCRIBBLES = """
class TritonPythonModel:
    def execute(self, requests):
        return [self.answer() for _ in requests]
    def answer(self):
        x = pb_utils.Tensor("IN", np.zeros(1, np.int32))
        inner = pb_utils.InferenceRequest(model_name="constant", requested_output_names=["OUT"], inputs=[x])
        values = pb_utils.get_output_tensor_by_name(inner.exec(), "OUT").as_numpy()
        values += 10
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)])
"""
ASKS_CONFIG = """
input { name: "PATH" data_type: TYPE_STRING dims: [-1] }
output { name: "END" data_type: TYPE_INT32 dims: [1] }
"""
METRICS = """
class TritonPythonModel:
    def initialize(self, args):
        self.family = pb_utils.MetricFamily("requests_seen", "Requests seen", pb_utils.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={"model": "metrics", "version": "1"})
    def execute(self, requests):
        self.metric.increment(len(requests))
        pb_utils.Logger.log_info("metrics executed")
        value = np.array([self.metric.value()], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for _ in requests]
"""
UPDATES = """
import threading
class TritonPythonModel:
    def initialize(self, args):
        make = pb_utils.MetricFamily
        self.families = [
            make("updates", "Updates", make.COUNTER),
            make("level", "Level", make.GAUGE),
            make("lengths", "Lengths", make.HISTOGRAM),
        ]
        counters, gauges, histograms = self.families
        self.counter = counters.Metric({"model": "updates"})
        self.gauge = gauges.Metric({"model": "updates"})
        self.histogram = histograms.Metric({"model": "updates"}, [1.0, 2.0])
    def count(self):
        for n in range(1000):
            self.counter.increment(1)
            self.histogram.observe(n)
            self.gauge.set(n)
    def execute(self, requests):
        threads = [threading.Thread(target=self.count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.gauge.set(6)
        self.gauge.increment(1)
        value = np.array([self.counter.value(), self.gauge.value()], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for _ in requests]
"""
PRE = """
class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
            scaled = (image.astype(np.float32) / 255).transpose(0, 3, 1, 2)
            tensors = [
                pb_utils.Tensor("PIXELS", scaled),  # not contiguous
                pb_utils.Tensor("SIZE", np.array([image.shape[1:3]] * len(image), np.int64)),
                pb_utils.Tensor("MEAN", scaled.mean(axis=(1, 2, 3))[:, None].astype(np.float16)),
            ]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
PRE_CONFIG = """
max_batch_size: 4
input { name: "IMAGE" data_type: TYPE_UINT8 dims: [-1, -1, 3] }
output { name: "PIXELS" data_type: TYPE_FP32 dims: [3, -1, -1] }
output { name: "SIZE" data_type: TYPE_INT64 dims: [2] }
output { name: "MEAN" data_type: TYPE_FP16 dims: [1] }
"""
WELL = """
import os

class TritonPythonModel:
    def initialize(self, args):
        self.sick = os.path.join(args["model_repository"], "sick")
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
    async def is_ready(self):
        return not os.path.exists(self.sick)
"""
COUNTED = """
class TritonPythonModel:
    def execute(self, requests):
        value = np.array([[len(requests)]], np.int32)
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", np.repeat(value, len(request.inputs()[0].as_numpy()), 0))]
            )
            for request in requests
        ]
"""
COUNTED_CONFIG = """
max_batch_size: 8 dynamic_batching { preferred_batch_size: [8] max_queue_delay_microseconds: 20000000 }
input { name: "IN" data_type: TYPE_INT32 dims: [1] } output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
"""


CALLS_PATIENT = """
class TritonPythonModel:
    def execute(self, requests):
        inner = pb_utils.InferenceRequest(
            model_name="patient", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", np.ones((1, 1), np.int32))]
        )
        message = inner.exec().error().message()
        raise pb_utils.TritonModelException(message)
"""
#: Waits for others to join it for longer than any test runs.
PATIENT_CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_INT32 dims: [1] } output { name: "y" data_type: TYPE_INT32 dims: [1] }
dynamic_batching { preferred_batch_size: [8] max_queue_delay_microseconds: 600000000 }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, write_python: Callable[..., Path]) -> Path:
    path = tmp_path_factory.mktemp("models")

    def write(*words: str, **files: str) -> Path:
        return write_python(path, *words, **files)

    write("add_sub", ADD_SUB, ADD_SUB_CONFIG)
    write("upper", UPPER, UPPER_CONFIG)
    write("repeat", REPEAT, DECOUPLED + INT_CONFIG)
    write("square", SQUARE, DECOUPLED + INT_CONFIG)
    write("describe", DESCRIBE, DESCRIBE_CONFIG)
    for name in ("red", "green"):
        words = {"words": "def greeting():\n    from helper import NAME\n    return 'hello ' + NAME\n"}
        helpers = {"helper": f"NAME = {name!r}\n", "lazy": f"NAME = 'lazy {name}'\n"}
        write(f"helped_{name}", HELPED, DESCRIBE_CONFIG, **helpers, **words)
    plain = {"EXECUTE": "def execute(self, requests):", "CALL": "inner.exec()"}
    awaited = {"EXECUTE": "async def execute(self, requests):", "CALL": "await inner.async_exec()"}
    for suffix, words in (("", plain), ("_async", awaited)):
        for name, code, config in (
            ("bls", BLS, ADD_SUB_CONFIG),
            ("asks", ASKS, ASKS_CONFIG),
            ("asks_too", ASKS, ASKS_CONFIG),
        ):
            for key, value in words.items():
                code = code.replace(key, value)
            write(name + suffix, code, config)
    write("constant", CONSTANT, INT_CONFIG)
    write("scribbles", SCRIBBLES, INT_CONFIG)
    write("metrics", METRICS, INT_CONFIG)
    write("updates", UPDATES, INT_CONFIG)
    write("preprocess", PRE, PRE_CONFIG)
    write("well", WELL, INT_CONFIG)
    write("impatient", CALLS_PATIENT, INT_CONFIG)
    (path / "patient" / "1").mkdir(parents=True)
    (path / "patient" / "config.pbtxt").write_text(PATIENT_CONFIG)
    write("counted", COUNTED, COUNTED_CONFIG)
    return path


@pytest.fixture(scope="module", params=["process", "thread"])
def server(request: pytest.FixtureRequest, repository: Path, keep_serving: Callable[..., Any]) -> Any:
    return keep_serving(f"--model-repository={repository}", f"--backend-config=python,isolation={request.param}")


@pytest.fixture
def client(server: Any) -> Iterator[http.InferenceServerClient]:
    with http.InferenceServerClient(f"127.0.0.1:{server.http}", concurrency=8) as found:
        yield found


def tensors(module: Any, **arrays: np.ndarray[Any, Any]) -> list[Any]:
    inputs = []
    for name, array in arrays.items():
        datatype = {"O": "BYTES", "f": "FP32", "i": "INT32", "u": "UINT8"}[array.dtype.kind]
        inputs.append(module.InferInput(name, list(array.shape), datatype))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def responses(server: Any, model: str, array: np.ndarray[Any, Any]) -> list[int]:
    """The values of all responses of a decoupled model to one request."""
    got: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as stream:
        stream.start_stream(lambda result, error: got.put((result, error)))
        stream.async_stream_infer(model, tensors(grpc, IN=array), enable_empty_final_response=True)
        values: list[int] = []
        while True:
            result, error = got.get(timeout=30)
            assert error is None
            if result.get_response().parameters["triton_final_response"].bool_param:
                return values
            values.append(int(result.as_numpy("OUT")[0]))


@pytest.mark.parametrize("module", [http, grpc])
def test_add_sub_adds_and_subtracts(server: Any, module: Any) -> None:
    a, b = np.arange(4, dtype=np.float32), np.full(4, 2, np.float32)
    port = server.http if module is http else server.grpc
    with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        result = client.infer("add_sub", tensors(module, INPUT0=a, INPUT1=b))
    assert result.as_numpy("OUTPUT0").tolist() == (a + b).tolist()
    assert result.as_numpy("OUTPUT1").tolist() == (a - b).tolist()


def test_strings_are_bytes_in_inputs_and_outputs(client: http.InferenceServerClient) -> None:
    words = np.array(["ab", "", "grün", "x" * 70000], np.object_)
    result = client.infer("upper", tensors(http, IN=words))
    assert result.as_numpy("OUT").tolist() == [word.encode().upper() for word in words]


def test_a_decoupled_model_streams_from_threads_of_its_own(server: Any) -> None:
    assert responses(server, "repeat", np.arange(200, dtype=np.int32)) == list(range(200))
    assert responses(server, "repeat", np.zeros(0, np.int32)) == []


def test_an_async_decoupled_model_streams_to_many_callers_at_once(server: Any) -> None:
    found: dict[int, list[int]] = {}

    def ask(count: int) -> None:
        found[count] = responses(server, "square", np.array([count], np.int32))

    threads = [threading.Thread(target=ask, args=(count,)) for count in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {count: [count] * count for count in range(6)}


def test_initialize_and_requests_get_all_fields(client: http.InferenceServerClient, repository: Path) -> None:
    result = client.infer(
        "describe", [], request_id="seven", sequence_id=5, parameters={"n": 3, "s": "text", "b": True}
    )
    described = json.loads(result.as_numpy("OUT")[0])
    config = json.loads(described["args"].pop("model_config"))
    assert described["args"] == {
        "model_instance_kind": "CPU",
        "model_instance_name": "describe_0_0",
        "model_instance_device_id": "0",
        "model_repository": str(repository / "describe"),
        "model_version": "1",
        "model_name": "describe",
    }
    assert config["parameters"] == {"colour": {"string_value": "blue"}}
    assert config["output"][0]["data_type"] == "TYPE_STRING"
    assert (described["id"], described["correlation_id"], described["outputs"], described["batch"]) == (
        "seven",
        5,
        ["OUT"],
        1,
    )
    assert {"n": 3, "s": "text", "b": True}.items() <= described["parameters"].items()
    assert result.get_response()["parameters"]["described"] is True


@pytest.mark.parametrize("name", ["red", "green"])
def test_models_import_their_own_modules_of_the_same_names(client: http.InferenceServerClient, name: str) -> None:
    described = client.infer(f"helped_{name}", []).as_numpy("OUT")[0].decode()
    assert described == f"{name}|{name}|hello {name}|lazy {name}"


@pytest.mark.parametrize("model", ["bls", "bls_async"])
def test_a_model_calls_another(client: http.InferenceServerClient, model: str) -> None:
    a, b = np.arange(4, dtype=np.float32), np.full(4, 2, np.float32)
    result = client.infer(model, tensors(http, INPUT0=a, INPUT1=b))
    assert result.as_numpy("OUTPUT0").tolist() == (a + b).tolist()


def test_writes_to_a_received_output_are_private(client: http.InferenceServerClient) -> None:
    for model, values in (("scribbles", [10, 11, 12]), ("scribbles", [10, 11, 12]), ("constant", [0, 1, 2])):
        assert client.infer(model, tensors(http, IN=np.zeros(1, np.int32))).as_numpy("OUT").tolist() == values


@pytest.mark.parametrize("suffix", ["", "_async"])
def test_a_chain_of_models_answers_and_a_deadlock_is_refused(client: http.InferenceServerClient, suffix: str) -> None:
    def ask(*path: str) -> Any:
        return client.infer(f"asks{suffix}", tensors(http, PATH=np.array([name.encode() for name in path], np.object_)))

    assert ask(f"asks_too{suffix}").as_numpy("END").tolist() == [1]
    for path in ((f"asks{suffix}",), (f"asks_too{suffix}", f"asks{suffix}")):
        with pytest.raises(InferenceServerException) as caught:
            ask(*path)
        assert " -> ".join(f"'{name}'" for name in (f"asks{suffix}", *path)) in caught.value.message()
    with pytest.raises(InferenceServerException, match="unknown model: 'nowhere'"):
        ask("nowhere")


def test_a_metric_of_a_model_is_on_the_page(client: http.InferenceServerClient, server: Any) -> None:
    before = server.metric("requests_seen", "metrics")
    result = client.infer("metrics", tensors(http, IN=np.zeros(1, np.int32)))
    assert result.as_numpy("OUT")[0] == before + 1 == server.metric("requests_seen", "metrics")


def test_metrics_are_on_the_page_before_the_response(client: http.InferenceServerClient, server: Any) -> None:
    before = server.metric("updates", "updates")
    for count in (1, 2):
        values = client.infer("updates", tensors(http, IN=np.zeros(1, np.int32))).as_numpy("OUT")
        assert server.metric("updates", "updates") == before + 4000 * count
        assert server.metric("lengths_count", "updates") == before + 4000 * count
        assert values.tolist() == [before + 4000 * count, 7]


def test_several_outputs_of_several_types_and_a_strided_one(client: http.InferenceServerClient) -> None:
    image = np.random.default_rng(3).integers(0, 256, (2, 5, 7, 3), np.uint8)
    result = client.infer("preprocess", tensors(http, IMAGE=image))
    pixels = (image.astype(np.float32) / 255).transpose(0, 3, 1, 2)
    assert np.array_equal(result.as_numpy("PIXELS"), pixels)
    assert result.as_numpy("SIZE").tolist() == [[5, 7], [5, 7]]
    assert np.allclose(result.as_numpy("MEAN")[:, 0], pixels.mean(axis=(1, 2, 3)), atol=1e-3)


def test_requests_that_wait_together_are_executed_together(client: http.InferenceServerClient) -> None:
    inputs = tensors(http, IN=np.zeros((2, 1), np.int32))
    waiting = [client.async_infer("counted", inputs) for _ in range(4)]
    assert [each.get_result().as_numpy("OUT").tolist() for each in waiting] == [[[4], [4]]] * 4


def test_is_ready_of_a_model_decides_its_readiness(client: http.InferenceServerClient, repository: Path) -> None:
    sick = repository / "well" / "sick"
    assert client.is_model_ready("well")
    sick.touch()
    try:
        assert not client.is_model_ready("well")
    finally:
        sick.unlink()
    assert client.is_model_ready("well")


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_model_is_initialized_and_finalized_once_and_an_error_of_finalize_is_logged(
    tmp_path: Path, write_python: Callable[..., Path], run_headrace: Callable[..., Any], isolation: str
) -> None:
    calls = tmp_path / "calls"
    code = f"""
    class TritonPythonModel:
        def say(self, word):
            with open({str(calls)!r}, "a") as file:
                file.write(word + " ")
        def initialize(self, args):
            self.say("initialize")
        def execute(self, requests):
            return [pb_utils.InferenceResponse([]) for _ in requests]
        def finalize(self):
            self.say("finalize")
            raise ValueError("too late")
    """
    write_python(tmp_path / "models", "life", code, INT_CONFIG)
    server = run_headrace(
        f"--model-repository={tmp_path / 'models'}", f"--backend-config=python,isolation={isolation}"
    ).wait_until_ready()
    server.stop()
    assert calls.read_text() == "initialize finalize "
    assert "finalize of 'life_0_0' failed: ValueError: too late" in server.log


@pytest.mark.parametrize("isolation", ["process", "thread"])
@pytest.mark.parametrize("verbose", [0, 1])
def test_clients_get_frames_and_the_log_whole_paths(
    tmp_path: Path, write_python: Callable[..., Path], run_headrace: Callable[..., Any], isolation: str, verbose: int
) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            raise ValueError("bad value")
    """
    path = write_python(tmp_path, "raises", code, INT_CONFIG) / "1" / "model.py"
    words = [f"--model-repository={tmp_path}", f"--backend-config=python,isolation={isolation}"]
    words.append(f"--log-verbose={verbose}")
    server = run_headrace(*words).wait_until_ready()
    with (
        http.InferenceServerClient(f"127.0.0.1:{server.http}") as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer("raises", tensors(http, IN=np.zeros(1, np.int32)))
    assert caught.value.message() == (
        "Failed to process the request(s) for model 'raises_0_0', message: ValueError: bad value\n\n"
        f"At:\n  {path if verbose else '1/model.py'}(7): execute\n"
    )
    server.stop()
    assert f"{path}(7): execute" in server.log


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_model_that_fails_at_every_request_does_not_fill_the_log(
    tmp_path: Path, write_python: Callable[..., Path], run_headrace: Callable[..., Any], isolation: str
) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            pb_utils.Logger.log_info("a line of its own")
            raise ValueError("bad value")
    """
    write_python(tmp_path, "raises", code, INT_CONFIG)
    words = [f"--model-repository={tmp_path}", f"--backend-config=python,isolation={isolation}"]
    server = run_headrace(*words).wait_until_ready()
    with http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        for _ in range(60):
            with pytest.raises(InferenceServerException):
                client.infer("raises", tensors(http, IN=np.zeros(1, np.int32)))
    server.stop()
    for text in ("'raises_0_0' failed: ", "Infer failed: "):
        written = [line for line in server.lines if text in line and "were left out" not in line]
        assert 10 <= len(written) <= 40  # 10 in 10 s, and the machine may be slow
    assert len([line for line in server.lines if "a line of its own" in line]) == 60


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_request_whose_sender_is_kept_for_ever_is_ended_when_the_server_stops(
    tmp_path: Path, write_python: Callable[..., Path], run_headrace: Callable[..., Any], isolation: str
) -> None:
    code = """
    class TritonPythonModel:
        def initialize(self, args):
            self.senders = []
        def execute(self, requests):
            self.senders += [request.get_response_sender() for request in requests]
            pb_utils.Logger.log_info("stored a sender")
    """
    write_python(tmp_path, "keeps", code, INT_CONFIG)
    words = [f"--model-repository={tmp_path}", f"--backend-config=python,isolation={isolation}"]
    server = run_headrace(*words, "--exit-timeout-secs=2").wait_until_ready()
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        client.async_infer(
            "keeps", tensors(grpc, IN=np.zeros(1, np.int32)), lambda result, error: answers.put((result, error))
        )
        server.wait_for_line("stored a sender")
        server.finish(signal.SIGTERM)
        result, error = answers.get(timeout=30)
    assert result is None
    assert "UNAVAILABLE" in str(error)


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_a_reloaded_model_has_the_new_text_of_all_its_modules(
    tmp_path: Path, write_python: Callable[..., Path], run_headrace: Callable[..., Any], isolation: str
) -> None:
    code = """
    class TritonPythonModel:
        def execute(self, requests):
            from helper import X
            value = np.array([X * 10 + NUMBER], np.int32)
            return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", value)]) for _ in requests]
    """
    words = [f"--model-repository={tmp_path}", f"--backend-config=python,isolation={isolation}"]
    write_python(tmp_path, "m", code.replace("NUMBER", "1"), INT_CONFIG, helper="X = 1")
    server = run_headrace(*words, "--model-control-mode=explicit", "--load-model=m").wait_until_ready()
    with http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        for number in range(1, 4):
            write_python(tmp_path, "m", code.replace("NUMBER", str(number)), INT_CONFIG, helper=f"X = {number}")
            os.utime(tmp_path / "m/1/helper.py", (10**9, 10**9))  # as if all were of the same second
            client.load_model("m")
            result = client.infer("m", tensors(http, IN=np.zeros(1, np.int32)))
            assert result.as_numpy("OUT").tolist() == [11 * number]
    server.stop()


@pytest.mark.parametrize("isolation", ["process", "thread"])
def test_each_instance_gets_its_own_name_and_kind(
    tmp_path: Path, write_python: Callable[..., Path], run_headrace: Callable[..., Any], isolation: str
) -> None:
    code = """
    from pathlib import Path
    class TritonPythonModel:
        def initialize(self, args):
            text = " ".join(args[f"model_instance_{key}"] for key in ("kind", "device_id"))
            Path(args["model_repository"], args["model_instance_name"]).write_text(text)
        def execute(self, requests):
            return [pb_utils.InferenceResponse([]) for _ in requests]
    """
    path = write_python(tmp_path, "m", code, INT_CONFIG + "instance_group { kind: KIND_MODEL count: 2 }")
    words = [f"--model-repository={tmp_path}", f"--backend-config=python,isolation={isolation}"]
    run_headrace(*words).wait_until_ready().stop()
    devices = {name: (path / name).read_text() for name in ("m_0_0", "m_1_0", "m_1_1")}
    assert devices == {"m_0_0": "CPU 0", "m_1_0": "MODEL 0", "m_1_1": "MODEL 0"}


@pytest.mark.parametrize("over", ["http", "grpc"])
def test_the_deadline_of_a_request_ends_the_requests_of_its_model(server: Any, over: str) -> None:
    """The instance, which waited for the answer, can serve the next request."""
    for _ in range(2):
        inputs = tensors(http if over == "http" else grpc, IN=np.ones(1, np.int32))
        if over == "http":
            with (
                http.InferenceServerClient(f"127.0.0.1:{server.http}") as caller,
                pytest.raises(InferenceServerException, match="Request timeout expired"),
            ):
                caller.infer("impatient", inputs, headers={"Request-Timeout-Ms": "300"})
        else:
            with (
                grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as caller,
                # The client's clock and the server's count the same deadline: either may be first.
                pytest.raises(InferenceServerException, match=r"Deadline Exceeded|Request timeout expired"),
            ):
                caller.infer("impatient", inputs, client_timeout=0.3)
        server.wait_until_pending("patient", 0)
        server.wait_until_pending("impatient", 0)
    assert server.metric("nv_inference_request_failure", "patient", reason="CANCELED") >= 2
