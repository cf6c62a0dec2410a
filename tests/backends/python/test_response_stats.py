"""``response_stats`` of a decoupled model, as the stock clients read them over both protocols."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from headrace import Server
from headrace.telemetry.response_statistics import MOST_COUNTED
from headrace_testing.serving import serve

#: Sends ``IN`` responses, each after 20 ms; if it is negative, the last is an error. Then the end.
MODEL = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            number = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            sender = request.get_response_sender()
            for index in range(abs(number)):
                time.sleep(0.02 if abs(number) < 100 else 0)
                if number < 0 and index == -number - 1:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("oh")))
                else:
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([index], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """backend: "python" instance_group { kind: KIND_CPU } model_transaction_policy { decoupled: true }
input { name: "IN" data_type: TYPE_INT32 dims: [1] } output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
"""
PLAIN = """backend: "identity"
input { name: "IN" data_type: TYPE_INT32 dims: [1] } output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
"""
ENSEMBLE = """platform: "ensemble"
input { name: "IN" data_type: TYPE_INT32 dims: [1] } output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
ensemble_scheduling { step { model_name: "thread" model_version: -1 input_map { key: "IN" value: "IN" }
    output_map { key: "OUT" value: "OUT" } } }
"""
STEP_NS = 20_000_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    for name in ("process", "thread"):
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1/model.py").write_text(MODEL)
        isolation = f'parameters {{ key: "isolation" value {{ string_value: "{name}" }} }}'
        (repository / name / "config.pbtxt").write_text(CONFIG + isolation)
    for name, config in {"plain": PLAIN, "ensemble": ENSEMBLE}.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    with serve(repository, listen=True) as running:
        yield running


def ask(server: Server, model: str, number: int) -> int:
    """Return how many responses came, the last included."""
    answers: queue.Queue[Any] = queue.Queue()
    tensor = tritonclient.grpc.InferInput("IN", [1], "INT32")
    tensor.set_data_from_numpy(np.array([number], np.int32))
    with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        client.async_stream_infer(model, [tensor], enable_empty_final_response=True)
        count = 0
        while True:
            count += 1
            answer = answers.get(timeout=60)
            is_response = not isinstance(answer, Exception)
            if is_response and answer.get_response().parameters["triton_final_response"].bool_param:
                return count


def counts(stats: dict[str, Any]) -> dict[str, dict[str, int]]:
    return {
        index: {name: int(each["count"]) for name, each in row.items() if int(each.get("count", 0))}
        for index, row in stats.items()
    }


@pytest.mark.parametrize("model", ["process", "thread"])
def test_each_response_is_counted_by_its_index(server: Server, model: str) -> None:
    assert [ask(server, model, number) for number in (3, 2, 0, -2)] == [4, 3, 1, 3]
    with (
        tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.options.http_port}") as http,
        tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.options.grpc_port}") as grpc,
    ):
        (over_http,) = http.get_inference_statistics(model)["model_stats"]
        (over_grpc,) = grpc.get_inference_statistics(model, as_json=True)["model_stats"]
    stats = over_http["response_stats"]
    expected = {
        "0": {"compute_infer": 3, "compute_output": 3, "success": 3, "empty_response": 1},
        "1": {"compute_infer": 3, "compute_output": 3, "success": 2, "fail": 1},
        "2": {"compute_infer": 1, "compute_output": 1, "success": 1, "empty_response": 2},
        "3": {"empty_response": 1},
    }
    assert counts(stats) == counts(over_grpc["response_stats"]) == expected
    for row in stats.values():
        assert list(row) == ["compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"]
        spent = row["compute_infer"]["ns"] + row["compute_output"]["ns"]
        assert spent == row["success"]["ns"] + row["fail"]["ns"]
    # Added up: a response that is late makes the time of its index longer, and that of the next one shorter.
    steps, took_ns = (sum(row["compute_infer"][what] for row in stats.values()) for what in ("count", "ns"))
    assert took_ns >= steps * STEP_NS * 0.9


def test_an_ensemble_of_a_decoupled_model_counts_its_own(server: Server) -> None:
    ask(server, "ensemble", 2)
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.options.http_port}") as http:
        (stats,) = http.get_inference_statistics("ensemble")["model_stats"]
    assert [counts(stats["response_stats"])[index]["success"] for index in ("0", "1")] == [1, 1]


def test_an_endless_stream_does_not_make_an_endless_document(server: Server) -> None:
    assert ask(server, "thread", MOST_COUNTED + 50) == MOST_COUNTED + 51
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.options.http_port}") as http:
        (stats,) = http.get_inference_statistics("thread")["model_stats"]
        assert len(stats["response_stats"]) == MOST_COUNTED
        (plain,) = http.get_inference_statistics("plain")["model_stats"]
        assert plain["response_stats"] == {}
