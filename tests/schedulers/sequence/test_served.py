"""Sequences through a real server and the stock client: a Python model that remembers, an ONNX net that does not."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from headrace import InferResponse, Server
from headrace_testing.serving import serve

#: Sums ``x`` by slot, or by id if it has ids, and returns its controls and its place in the batch.
SUMS = """
import numpy as np
import triton_python_backend_utils as pb_utils


def control(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0]


class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}
        self.by_id = "oldest" in args["model_name"]

    def execute(self, requests):
        return [self.answer(slot, len(requests), request) for slot, request in enumerate(requests)]

    def answer(self, slot, count, request):
        start, end, ready, name = (control(request, name) for name in ("START", "END", "READY", "ID"))
        key = name if self.by_id else slot
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if ready:
            self.sums[key] = x + (0 if start else self.sums[key])
        name = name.decode() if isinstance(name, bytes) else int(name)
        told = f"{slot}/{count} {name} {int(start)}{int(end)}{int(ready)} {request.correlation_id()} {request.flags()}"
        outputs = [("sum", self.sums.get(key, x)), ("told", np.array([[told.encode()]], np.object_))]
        return pb_utils.InferenceResponse([pb_utils.Tensor(*output) for output in outputs])
"""
CONFIG = """backend: "%s" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "sum" data_type: TYPE_FP32 dims: 2 }
%s
sequence_batching { %s max_sequence_idle_microseconds: 60000000
    control_input { name: "START" control { kind: CONTROL_SEQUENCE_START %s } }
    control_input { name: "END" control { kind: CONTROL_SEQUENCE_END %s } }
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY %s } }
    control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_%s } }
}"""
TOLD = 'output { name: "told" data_type: TYPE_STRING dims: 1 }'
STATE = """state { input_name: "s" output_name: "s2" data_type: TYPE_FP32 dims: 2
    initial_state { name: "one" data_type: TYPE_FP32 dims: 2 data_file: "ones" } }"""
INT, FLOAT, BOOL = "int32_false_true: [0, 1]", "fp32_false_true: [0, 1]", "bool_false_true: [false, true]"

#: Sends a request: model, ``x`` and fields of the sequence. Returns the sum and the model's controls.
Ask: TypeAlias = Callable[..., tuple[list[float], str]]


def net() -> onnx.ModelProto:
    """``sum = s2 = s * (1 - START) + x + START``: a start adds 1, which shows that START arrives."""
    two: list[str | int | None] = ["n", 2]
    one: list[str | int | None] = ["n", 1]
    nodes = [
        helper.make_node("Cast", ["START"], ["start"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["s", "x"], ["both"]),
        helper.make_node("Add", ["both", "start"], ["s2"]),
        helper.make_node("Identity", ["s2"], ["sum"]),
        helper.make_node("Cast", ["END"], ["end"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["READY"], ["ready"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["ID"], ["id"], to=TensorProto.FLOAT),
        helper.make_node("Concat", ["start", "end", "ready", "id"], ["controls"], axis=1),
    ]
    kinds = {"START": TensorProto.INT32, "END": TensorProto.FLOAT, "READY": TensorProto.BOOL, "ID": TensorProto.INT32}
    graph = helper.make_graph(
        nodes,
        "sums",
        [
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, two) for name in ("x", "s")),
            *(helper.make_tensor_value_info(name, kind, one) for name, kind in kinds.items()),
        ],
        [
            *(helper.make_tensor_value_info(name, TensorProto.FLOAT, two) for name in ("sum", "s2")),
            helper.make_tensor_value_info("controls", TensorProto.FLOAT, ["n", 4]),
        ],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    for name, strategy, kinds, identity in (
        ("direct_sums", "direct { }", (INT, FLOAT, BOOL), "UINT64"),
        ("counted_sums", "direct { }", (INT, FLOAT, BOOL), "UINT64"),
        ("oldest_sums", "oldest { }", (BOOL, INT, FLOAT), "STRING"),
    ):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1/model.py").write_text(SUMS)
        (repository / name / "config.pbtxt").write_text(CONFIG % ("python", TOLD, strategy, *kinds, identity))
    threads = 'parameters { key: "isolation" value { string_value: "thread" } }'
    for kind in ("INT64", "UINT32", "INT32"):
        folder = repository / f"{kind.lower()}_sums"
        (folder / "1").mkdir(parents=True)
        (folder / "1/model.py").write_text(SUMS)
        (folder / "config.pbtxt").write_text(CONFIG % ("python", TOLD, "direct { }", INT, INT, INT, kind) + threads)
    shown = 'output { name: "s2" data_type: TYPE_FP32 dims: 2 }'
    apart = 'parameters { key: "isolation" value { string_value: "process" } }'
    for name, strategy, more in (
        ("direct_net", "direct { }", ""),
        ("counted_net", "direct { }", "instance_group { kind: KIND_CPU count: 1 }"),
        ("oldest_net", "oldest { }", ""),
        ("shown_net", "direct { }", shown),
        ("process_net", "direct { }", apart),
    ):
        folder = repository / name
        for part in ("1", "initial_state"):
            (folder / part).mkdir(parents=True)
        onnx.save(net(), folder / "1/model.onnx")
        (folder / "initial_state/ones").write_bytes(np.ones(2, np.float32).tobytes())
        controls = 'output { name: "controls" data_type: TYPE_FP32 dims: 4 }'
        config = CONFIG % ("onnxruntime", controls, strategy + STATE, INT, FLOAT, BOOL, "INT32")
        (folder / "config.pbtxt").write_text(config + more)
    with serve(repository, listen=True) as running:
        yield running


def _infer(client: Any, connection: Any, model: str, x: Sequence[float], **sequence: Any) -> tuple[list[float], str]:
    tensor = client.InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.array([x], np.float32))
    return _read(connection.infer(model, [tensor], **sequence), model)


def _read(result: Any, model: str) -> tuple[list[float], str]:
    controls = result.as_numpy("controls" if model.endswith("net") else "told")[0]
    text = " ".join(f"{number:g}" for number in controls) if model.endswith("net") else controls[0].decode()
    outputs = result.get_response()
    names = [output["name"] if isinstance(output, dict) else output.name for output in _outputs(outputs)]
    assert "s2" not in names
    return result.as_numpy("sum")[0].tolist(), text


def _outputs(response: Any) -> Any:
    return response["outputs"] if isinstance(response, dict) else response.outputs


def _streamed(connection: Any, answers: queue.Queue[Any], model: str, x: Sequence[float], **sequence: Any) -> Any:
    tensor = tritonclient.grpc.InferInput("x", [1, 2], "FP32")
    tensor.set_data_from_numpy(np.array([x], np.float32))
    connection.async_stream_infer(model, [tensor], **sequence)
    result, error = answers.get(timeout=90)
    if error is not None:
        raise error
    return _read(result, model)


@pytest.fixture(params=["http", "grpc", "stream"])
def ask(request: pytest.FixtureRequest, server: Server) -> Iterator[Ask]:
    if request.param == "http":
        with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.options.http_port}") as connection:
            yield partial(_infer, tritonclient.http, connection)
        return
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as connection:
        if request.param == "grpc":
            yield partial(_infer, tritonclient.grpc, connection)
            return
        answers: queue.Queue[Any] = queue.Queue()
        connection.start_stream(lambda result, error: answers.put((result, error)))
        yield partial(_streamed, connection, answers)
        connection.stop_stream()


@pytest.mark.parametrize(("model", "one", "two"), [("direct_sums", 7, 2**62 + 5), ("oldest_sums", "seven", "七")])
def test_a_stateful_model_gets_each_request_with_its_slot_and_controls(
    model: str, one: int | str, two: int | str, ask: Ask
) -> None:
    first, second = partial(ask, model, sequence_id=one), partial(ask, model, sequence_id=two)
    direct = model == "direct_sums"
    place = "1/2" if direct else "0/1"  # the second sequence has the second slot; the first slot is empty
    assert first([1, 2], sequence_start=True) == ([1, 2], f"0/1 {one} 101 {one} 1")
    assert second([10, 20], sequence_start=True) == ([10, 20], f"{place} {two} 101 {two} 1")
    assert first([1, 1]) == ([2, 3], f"0/1 {one} 001 {one} 0")
    assert second([1, 1]) == ([11, 21], f"{place} {two} 001 {two} 0")
    assert first([1, 1], sequence_end=True) == ([3, 4], f"0/1 {one} 011 {one} 2")
    with pytest.raises(InferenceServerException) as refusal:
        first([1, 1])
    assert refusal.value.message() == (
        f"inference request for sequence {one} to model '{model}' must specify the START flag on the first request of "
        "the sequence"
    )
    with pytest.raises(InferenceServerException, match="cannot be longer than 128 characters") as refusal:
        ask(model, [1, 1], sequence_id="z" * 129, sequence_start=True)
    assert refusal.value.status() in ("501", "StatusCode.UNIMPLEMENTED", None)  # a stream has none
    assert second([1, 1], sequence_start=True, sequence_end=True) == ([1, 1], f"{place} {two} 111 {two} 3")


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("direct_sums", 2**63 - 5, 2**63 - 5),
        ("int64_sums", 2**63 - 5, 2**63 - 5),
        ("uint32_sums", 2**40 + 2**32 - 6, 2**32 - 6),
        ("int32_sums", 2**40 + 2**32 - 6, -6),
        ("oldest_sums", "λ" * 60, "λ" * 60),
    ],
)
def test_an_id_is_cast_to_the_type_of_its_control(model: str, given: int | str, expected: int | str, ask: Ask) -> None:
    answer = ask(model, [1, 2], sequence_id=given, sequence_start=True, sequence_end=True)
    assert answer == ([1, 2], f"0/1 {expected} 111 {given} 3")


@pytest.mark.parametrize("model", ["direct_net", "oldest_net", "process_net"])
def test_the_server_keeps_the_state_of_a_stateless_network(model: str, ask: Ask) -> None:
    first, second = partial(ask, model, sequence_id=7), partial(ask, model, sequence_id=2**40 + 8)
    assert first([1, 2], sequence_start=True) == ([3, 4], "1 0 1 7")
    assert second([10, 20], sequence_start=True) == ([12, 22], "1 0 1 8")
    assert first([1, 1]) == ([4, 5], "0 0 1 7")
    assert second([1, 1]) == ([13, 23], "0 0 1 8")
    assert first([0, 0], sequence_start=True) == ([2, 2], "1 0 1 7")
    for again in (first, second):
        again([0, 0], sequence_end=True)


def test_a_state_that_is_also_an_output_is_returned_on_request(server: Server) -> None:
    ask = partial(server.infer, "shown_net", {"x": np.ones((1, 2), np.float32)}, sequence_id=5)
    assert sorted(ask(sequence_start=True).outputs) == ["controls", "s2", "sum"]
    assert sorted(ask(outputs=("sum",)).outputs) == ["sum"]
    outputs = ask(outputs=("s2", "controls"), sequence_end=True).outputs
    assert sorted(outputs) == ["controls", "s2"]
    np.testing.assert_array_equal(np.asarray(outputs["s2"]), [[5, 5]])


def test_statistics_ignore_empty_slots(server: Server) -> None:
    before = server.served("direct_net")[0].snapshot()
    ask = partial(server.infer, "direct_net", {"x": np.ones((1, 2), np.float32)})
    for number in (1, 2):
        ask(sequence_id=number, sequence_start=True)
    answer = ask(sequence_id=2, sequence_end=True)
    assert isinstance(answer, InferResponse)
    assert sorted(answer.outputs) == ["controls", "sum"]
    ask(sequence_id=1, sequence_end=True)
    after = server.served("direct_net")[0].snapshot()
    assert after.success.count - before.success.count == 4
    assert after.executions.inference_count - before.executions.inference_count == 4
    assert after.executions.execution_count - before.executions.execution_count == 4
    assert {*after.executions.batches} == {1}


@pytest.mark.parametrize("model", ["counted_sums", "counted_net"])
def test_empty_slots_are_rows_of_the_execution_and_no_inferences(server: Server, model: str) -> None:
    """The numbers are those of a real Triton 2.51 for the same requests."""
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.options.http_port}") as client:
        for number, is_start in ((1, True), (2, True), (3, True), (3, False), (3, False), (1, False)):
            _infer(tritonclient.http, client, model, [1, 2], sequence_id=number, sequence_start=is_start)
        (statistics,) = client.get_inference_statistics(model)["model_stats"]
    assert (statistics["inference_count"], statistics["execution_count"]) == (6, 6)
    assert statistics["inference_stats"]["success"]["count"] == 6
    assert [(each["batch_size"], each["compute_infer"]["count"]) for each in statistics["batch_stats"]] == [
        (1, 2),
        (2, 1),
        (3, 3),
    ]
