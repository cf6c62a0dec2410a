"""Instances of a Python model are added and removed while a real server serves it. The model counts them: the steps of
Triton's own test, by the stock client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from tests.conftest import Headrace

    WaitUntil = Callable[..., None]

MODEL = """
import json
from pathlib import Path
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.counts = Path(json.loads(args["model_config"])["parameters"]["counts"]["string_value"])
        self.count("initialize")
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
            for r in requests
        ]
    def finalize(self):
        self.count("finalize")
    def count(self, what):
        with (self.counts / what).open("a") as lines:
            lines.write(".")
"""
CONFIG = """
backend: "python" max_batch_size: 8
input { name: "IN" data_type: TYPE_FP32 dims: [-1] } output { name: "OUT" data_type: TYPE_FP32 dims: [-1] }
"""
BATCHING = "dynamic_batching { max_queue_delay_microseconds: 1000 }"
THREAD = 'parameters { key: "isolation" value { string_value: "thread" } }'


class Counting:
    """One model of ``server``, loaded and inferred over gRPC."""

    def __init__(self, server: Headrace, directory: Path, name: str, more: str) -> None:
        self.name, self._directory = name, directory
        self.client = triton.InferenceServerClient(f"127.0.0.1:{server.grpc}")
        (directory / name / "1").mkdir(parents=True)
        (directory / name / "1" / "model.py").write_text(MODEL)
        self._counts = directory / f"counts-{name}"
        self._counts.mkdir()
        self._head = f'{CONFIG}{more} parameters {{ key: "counts" value {{ string_value: "{self._counts}" }} }}'

    def counts(self) -> tuple[int, int]:
        """Return the number of calls of ``initialize`` and ``finalize``."""
        files = (self._counts / "initialize", self._counts / "finalize")
        sizes = [file.stat().st_size if file.exists() else 0 for file in files]
        return sizes[0], sizes[1]

    def write(self, groups: str) -> None:
        (self._directory / self.name / "config.pbtxt").write_text(self._head + groups)

    def load(self, groups: str) -> tuple[int, int]:
        """Load with these instance groups. Return the calls that it adds to `counts`, as soon as it has returned."""
        before = self.counts()
        self.write(groups)
        self.client.load_model(self.name)
        after = self.counts()
        return after[0] - before[0], after[1] - before[1]

    def ask(self) -> None:
        x = np.random.rand(1, 3).astype(np.float32)
        tensor = triton.InferInput("IN", x.shape, "FP32")
        tensor.set_data_from_numpy(x)
        assert np.array_equal(self.client.infer(self.name, [tensor]).as_numpy("OUT"), x)

    @contextmanager
    def asked(self, concurrency: int = 4) -> Iterator[None]:
        """Send requests all the time; fail if any request does."""
        done = Event()

        def work() -> int:
            count = 0
            while not done.is_set():
                self.ask()
                count += 1
            return count

        with ThreadPoolExecutor(concurrency) as callers:
            asking = [callers.submit(work) for _ in range(concurrency)]
            try:
                yield
            finally:
                done.set()
            assert all(caller.result() > 0 for caller in asking)

    def shown(self) -> list[int]:
        """The counts of the groups, as the config endpoint has them."""
        config = self.client.get_model_config(self.name, as_json=True)["config"]
        return [group["count"] for group in config["instance_group"]]


def group(count: int, more: str = "") -> str:
    return f"instance_group {{ count: {count} kind: KIND_CPU {more} }}\n"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repository")


@pytest.fixture(scope="module")
def server(repository: Path, keep_serving: Callable[..., Headrace]) -> Headrace:
    words = "--model-control-mode=explicit", "--rate-limit=execution_count"
    return keep_serving(f"--model-repository={repository}", *words)


@pytest.mark.parametrize("more", ["", THREAD + BATCHING], ids=["process", "thread"])
def test_only_changed_instances_are_initialized_and_finalized_and_no_request_fails(
    server: Headrace, repository: Path, wait_until: WaitUntil, request: pytest.FixtureRequest, more: str
) -> None:
    model = Counting(server, repository, f"counting-{request.node.callspec.id}", more)
    assert model.load(group(2)) == (2, 0)
    with model.asked():
        assert model.load(group(3)) == (1, 0)
        assert model.load(group(2)) == (0, 1)
        assert model.load(group(4)) == (2, 0)
        assert model.shown() == [4]
        model.write("--- invalid config ---")
        with pytest.raises(InferenceServerException):
            model.client.load_model(model.name)
        assert model.load(group(1, 'name: "other"')) == (0, 3)
        assert model.load(group(0, 'name: "other"')) == (0, 0)
        resources = 'rate_limiter { resources { name: "R1" count: 2 } }'
        assert model.load(group(1, resources)) == (1, 1)
    override = json.dumps({**model.client.get_model_config(model.name, as_json=True)["config"], "instance_group": []})
    model.client.load_model(model.name, config=override)
    model.ask()
    made, closed = model.counts()
    assert made - closed == 1
    model.client.unload_model(model.name)
    wait_until(lambda: model.counts() == (made, made), "all instances are finalized")
