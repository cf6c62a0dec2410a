"""The process of an instance dies in the middle of iterations, on a real server."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from headrace import Server
from headrace_testing.serving import serve

from .test_iterative_served import Caller

#: Reschedules each request, and records the process of its first run. If a file ``die_PID`` exists, that process kills
#: itself in its next run. If a file ``go`` exists, requests are answered with the process of their first run. Another
#: process does not have that record.
MODEL = """
import os
import signal
from pathlib import Path
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.begun, self.folder = {}, Path(__file__).parent
        self.decoupled = "decoupled" in args["model_name"]

    def execute(self, requests):
        if (self.folder / f"die_{os.getpid()}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        answers = [self.step(request) for request in requests]
        return None if self.decoupled else answers

    def step(self, request):
        response = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([[os.getpid()]], np.int32))])
        if pb_utils.get_input_tensor_by_name(request, "READY").as_numpy().item() == 0:
            return response
        id = request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.begun[id] = os.getpid()
            (self.folder / f"{request.request_id()}_runs_in_{os.getpid()}").touch()
        assert self.begun[id] == os.getpid()
        if not (self.folder / "go").exists():
            request.set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)
            return None
        if self.decoupled:
            request.get_response_sender().send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            return None
        return response
"""
CONFIG = """backend: "python" max_batch_size: 2 instance_group { kind: KIND_CPU count: 2 }
input { name: "IN" data_type: TYPE_INT32 dims: 1 } output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
sequence_batching { iterative_sequence: true %s
    control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] } } }
parameters { key: "isolation" value { string_value: "process" } }
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
#: With four candidates in batches of two, some wait between two runs when their process crashes.
MODELS = {
    "direct": CONFIG % "direct { }",
    "direct_decoupled": CONFIG % "direct { }" + DECOUPLED,
    "oldest": CONFIG % "oldest { max_candidate_sequences: 4 }",
    "oldest_decoupled": CONFIG % "oldest { max_candidate_sequences: 4 }" + DECOUPLED,
}
#: As many as have a place.
CALLERS = {"direct": 4, "oldest": 8}
DIED = re.compile(r"Stub process '\w+' is not healthy\. Model instance '\w+' ")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("repository")
    for name, config in MODELS.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "1/model.py").write_text(MODEL)
        (repository / name / "config.pbtxt").write_text(config)
    with serve(repository, listen=True) as running:
        yield running


def begun(folder: Path, callers: Mapping[str, Caller]) -> dict[str, int]:
    """Return the process of the first run of each started request of ``callers``, by name."""
    found = (path.name.split("_runs_in_") for path in folder.glob("*_runs_in_*"))
    return {name: int(process) for name, process in found if name in callers}


@pytest.mark.parametrize("model", MODELS)
def test_an_iterating_request_in_a_crashed_process_fails_and_others_continue(
    model: str, server: Server, wait_until: Callable[..., None]
) -> None:
    (served,) = server.served(model)
    folder = served.model.path
    number = CALLERS[model.partition("_")[0]]
    callers = {f"caller{n}": Caller(server, model, n, request_id=f"caller{n}") for n in range(number)}
    wait_until(lambda: len(begun(folder, callers)) == number, "all iterate")
    processes = begun(folder, callers)
    first, second = set(processes.values())
    lost = {name for name, process in processes.items() if process == first}
    assert len(lost) == number // 2

    (folder / f"die_{first}").touch()
    wait_until(lambda: sorted(executor.restarts for executor in served.executors) == [0, 1], "one has died")
    answers_by_name = {name: callers[name].all() for name in lost}
    assert all(len(answers) == 1 and isinstance(answers[0], str) for answers in answers_by_name.values()), (
        answers_by_name
    )
    executed = [name for name, (answer,) in answers_by_name.items() if DIED.search(answer)]
    assert (
        executed
    )  # they were a batch; requests that waited between two runs continue in the next process, without its record
    assert all("KeyError" in answer for name, (answer,) in answers_by_name.items() if name not in executed)

    (folder / "go").touch()
    assert [callers[name].all() for name in sorted(processes) if name not in lost] == [[second]] * (number // 2)
    wait_until(lambda: all(executor.alive for executor in served.executors), "it has been started again")
    after = {f"after{n}": Caller(server, model, n, request_id=f"after{n}") for n in range(number)}
    answers = {name: caller.all() for name, caller in after.items()}
    assert answers == {name: [process] for name, process in begun(folder, after).items()}
    model_queue = served.model_queue
    wait_until(lambda: (model_queue.in_flight, model_queue.pending) == (0, 0), "nothing is left")
    assert model_queue.full_scheduler.measure()["headrace_sequences_active"] == 0
