"""Attacks by what requests ask of the schedulers: ids of others, resources that wait for each other, and crashes."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace

    UnderAttack = Callable[..., AbstractContextManager[None]]

IO = """
input { name: "IN" data_type: TYPE_INT32 dims: [1] } output { name: "OUT" data_type: TYPE_INT32 dims: [1] }
"""
#: Answers ``IN`` times, once in each run.
GENERATE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.left = {}

    def execute(self, requests):
        for request in requests:
            id = request.correlation_id()
            wanted = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().ravel()[0])
            left = wanted if request.flags() & 1 else self.left[id]
            self.left[id] = left - 1
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[left]], np.int32))])
            if left > 1:
                request.get_response_sender().send(answer)
                request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            else:
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                request.get_response_sender().send(answer, flags=final)
"""
GENERATING = (
    'backend: "python" max_batch_size: 8 model_transaction_policy { decoupled: true } '
    "sequence_batching { iterative_sequence: true oldest { max_candidate_sequences: 256 } } "
    "instance_group { kind: KIND_CPU }" + IO
)
#: Asks the model ``wants``, or waits as many milliseconds as ``IN`` says.
HOLDER = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.asks = args["model_name"] == "holds"

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "IN")
            if self.asks:
                call = pb_utils.InferenceRequest(model_name="wants", requested_output_names=["OUT"], inputs=[x])
                answer = call.exec()
                if answer.has_error():
                    answers.append(pb_utils.InferenceResponse(error=answer.error()))
                    continue
            else:
                time.sleep(int(x.as_numpy()[0]) / 1000)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x.as_numpy())]))
        return answers
"""
FRAGILE = """
import os
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            if x[0] == 13:
                os._exit(3)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", x)]))
        return answers
"""
#: Responses that each victim of an iterative model wants, and ids that the attacker tries.
WANTED, TRIED = 400, 32


def add(repository: Path, name: str, config: str, code: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(config)
    (repository / name / "1" / "model.py").write_text(code)


def tensor(number: int, *shape: int) -> list[Any]:
    given = triton.InferInput("IN", shape or [1], "INT32")
    given.set_data_from_numpy(np.full(shape or [1], number, np.int32))
    return [given]


class Stream:
    """A caller of the model ``generate`` with a connection of its own."""

    def __init__(self, port: int, wanted: int, **sequence: Any) -> None:
        self._client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        self._answers: queue.Queue[Any] = queue.Queue()
        self._client.start_stream(lambda result, error: self._answers.put(error or result))
        self._client.async_stream_infer("generate", tensor(wanted, 1, 1), **sequence)

    def read(self, count: int, timeout_s: float = 60) -> list[Any]:
        """Return so many answers, or those up to an error."""
        found: list[Any] = []
        while len(found) < count and (not found or isinstance(found[-1], int)):
            answer = self._answers.get(timeout=timeout_s)
            found.append(str(answer) if isinstance(answer, Exception) else int(answer.as_numpy("OUT")[0, 0]))
        return found

    def leave(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()


def test_ids_of_others_are_guessed(
    serve: Callable[..., Headrace], attack_repository: Path, under_attack: UnderAttack, tmp_path: Path
) -> None:
    """A caller that sends the id of a running sequence joins it, and ends it by disconnecting: the victims send no
    id."""
    add(tmp_path, "generate", GENERATING, GENERATE)
    server = serve(f"--model-repository={attack_repository}", f"--model-repository={tmp_path}")
    Stream(server.grpc, 1).read(1)
    with under_attack(server, kept_bytes=64 << 20):
        victims = [Stream(server.grpc, WANTED) for _ in range(4)]
        for number in range(1, TRIED):
            attacker = Stream(server.grpc, 1000, sequence_id=number, sequence_start=True)
            with contextlib.suppress(queue.Empty):  # it may stand behind a victim
                attacker.read(1, 0.05)
            attacker.leave()
        told = [victim.read(WANTED) for victim in victims]
    assert told == [list(range(WANTED, 0, -1))] * 4


def test_resources_are_held_by_who_waits_for_them(
    serve: Callable[..., Headrace],
    attack_repository: Path,
    under_attack: UnderAttack,
    tmp_path: Path,
    wait_until: Callable[..., None],
) -> None:
    """Of 4 units ``holds`` has 2 and asks ``wants``, which needs 3, while ``slow`` has 2 for a moment."""
    for name, units in {"holds": 2, "wants": 3, "slow": 2}.items():
        limit = f'rate_limiter {{ resources {{ name: "R" count: {units} }} }}'
        add(tmp_path, name, f'backend: "python" instance_group {{ kind: KIND_CPU {limit} }}' + IO, HOLDER)
    server = serve(
        f"--model-repository={attack_repository}", f"--model-repository={tmp_path}", "--rate-limit=execution_count",
        "--rate-limit-resource=R:4",
    )  # fmt: skip
    answers: queue.Queue[Any] = queue.Queue()

    def put(result: Any, error: Any) -> None:
        answers.put(error or result)

    with under_attack(server, kept_bytes=64 << 20), triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        for is_leaving in (False, True):
            slow = client.async_infer("slow", tensor(1000), put)
            wait_until(lambda: units_in_use(server) == 2, "slow runs")
            call = client.async_infer("holds", tensor(1), put)
            wait_until(lambda: units_in_use(server) == 4, "holds runs")
            if is_leaving:
                call.cancel()
            told = [answers.get(timeout=60) for _ in (slow, call)]
            assert any(isinstance(each, InferenceServerException) for each in told)
            wait_until(lambda: units_in_use(server) == 0, "all units are back", 20)
        assert client.infer("wants", tensor(1)).as_numpy("OUT").tolist() == [1]


def units_in_use(server: Headrace) -> float:
    line = next(
        each for each in metrics(server).splitlines() if each.startswith(b"headrace_rate_limiter_units_in_use{")
    )
    return float(line.rpartition(b" ")[2])


def metrics(server: Headrace) -> bytes:
    return get(server.ports["Metrics Service"], "/metrics")[1]


def get(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@pytest.mark.parametrize("is_loaded", [True, False], ids=["loaded", "by itself"])
def test_requests_that_crash_a_model(
    serve: Callable[..., Headrace],
    attack_repository: Path,
    under_attack: UnderAttack,
    tmp_path: Path,
    wait_until: Callable[..., None],
    is_loaded: bool,
) -> None:
    """Five crashes in a minute, on a server in the default control mode."""
    add(tmp_path, "fragile", 'backend: "python" instance_group { kind: KIND_CPU }' + IO, FRAGILE)
    server = serve(f"--model-repository={attack_repository}", f"--model-repository={tmp_path}")
    with under_attack(server, kept_bytes=64 << 20), triton.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        for _ in range(5):
            wait_until(lambda: client.is_model_ready("fragile"), "it is ready", 60)
            with pytest.raises(InferenceServerException, match="exited with status 3"):
                client.infer("fragile", tensor(13))
        for path in ("/v2/health/ready", "/v2/models/fragile/ready"):
            status, body = get(server.http, path)
            assert status == 400
            assert "died 5 times within 60 s; it starts again at 20" in json.loads(body)["error"]
        assert get(server.http, "/v2/health/live")[0] == 200
        with pytest.raises(InferenceServerException, match="Died 5 times within 60 s"):
            client.infer("fragile", tensor(1))
        if is_loaded:
            assert get(server.http, "/v2/repository/models/fragile/load", "POST") == (200, b"")
        wait_until(lambda: get(server.http, "/v2/health/ready") == (200, b""), "it is back", 60)
        assert client.infer("fragile", tensor(1)).as_numpy("OUT").tolist() == [1]
    status, refusal = get(server.http, "/v2/repository/models/fragile/load", "POST")
    assert (status, json.loads(refusal)["error"].partition(";")[0]) == (
        503, "explicit model load / unload is not allowed in model control mode 'none'",
    )  # fmt: skip
