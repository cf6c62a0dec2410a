"""Python models in processes that give and take tensors on a real GPU. Oracles: arithmetic, and nvidia-smi."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceError, Server
from headrace_engines import CudaLibrary
from headrace_testing.serving import serve
from tests.e2e.test_gpu_served import NO_CUDA, REGIONS_CLIENT, write_onnx

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch finds no GPU"),
]
IO = """
max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
ON_GPU = "instance_group { kind: KIND_GPU }"
IN_PROCESS = 'parameters { key: "isolation" value { string_value: "process" } }'
DEVICE_INPUTS = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'
#: PyTorch's backend, in a thread of the server: adds 1.
NET = """
import torch


class Net(torch.nn.Module):
    def forward(self, x):
        assert x.is_cuda
        return x + 1
"""
#: Doubles its input, on a stream of its own. Adds 1000 if its input is in the memory of the host.
DOUBLED = """
import os
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.stream = torch.cuda.Stream()

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            with torch.cuda.stream(self.stream):
                given = torch.from_dlpack(x)
                assert given.is_cuda is not x.is_cpu()
                if given.flatten()[0] == -1:
                    os._exit(3)
                y = given.cuda() * 2 + 1000 * x.is_cpu()
                answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", y)]))
        return answers
"""
CALLER = """
import json
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = torch.from_dlpack(pb_utils.get_input_tensor_by_name(request, "x")).cuda()
            asked = json.loads(request.parameters())
            for name in asked["targets"].split():
                call = pb_utils.InferenceRequest(
                    model_name=name, requested_output_names=["y"], inputs=[pb_utils.Tensor.from_dlpack("x", x)]
                )
                answer = call.exec()
                if answer.has_error():
                    raise pb_utils.TritonModelException(answer.error().message())
                y = pb_utils.get_output_tensor_by_name(answer, "y")
                assert not y.is_cpu(), name
                x = torch.from_dlpack(y.to_dlpack())
                assert x.is_cuda
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", x)]))
        return answers
"""
STEP = """
  step { model_name: "%s" model_version: -1 input_map { key: "x" value: "%s" } output_map { key: "y" value: "%s" } }
"""
X = np.arange(8, dtype=np.float32).reshape(2, 4)


def write(root: Path, name: str, config: str, code: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    if code:
        (root / name / "1/model.py").write_text(code)
    (root / name / "config.pbtxt").write_text(config + IO)


def write_chain(root: Path, *steps: str) -> None:
    names = ["x", *[f"t{number}" for number in range(1, len(steps))], "y"]
    mapped = "".join(STEP % (step, names[number], names[number + 1]) for number, step in enumerate(steps))
    write(root, "_".join(steps), f'platform: "ensemble" ensemble_scheduling {{ {mapped} }}')


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("models")
    write(root, "net", f'backend: "pytorch" runtime: "model.py" {ON_GPU}', NET)
    write(root, "doubled", f'backend: "python" {ON_GPU} {DEVICE_INPUTS}', DOUBLED)
    write(root, "from_host", f'backend: "python" {ON_GPU}', DOUBLED)
    write(root, "apart", f'backend: "pytorch" runtime: "model.py" {ON_GPU} {IN_PROCESS}', NET)
    expandable = 'import os\nos.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"\n'
    write(root, "expandable", f'backend: "python" {ON_GPU} {DEVICE_INPUTS}', expandable + DOUBLED)
    chosen = 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "0"\n'
    write(root, "chosen", f'backend: "python" {ON_GPU} {DEVICE_INPUTS}', chosen + DOUBLED)
    write(root, "caller", f'backend: "python" {ON_GPU}', CALLER)
    write_chain(root, "net", "doubled", "net")
    write_chain(root, "doubled", "doubled", "doubled")
    write_chain(root, "net", "from_host", "doubled")
    write_chain(root, "apart", "doubled", "apart")
    write_chain(root, "expandable", "chosen", "expandable")
    with serve(root, listen=True, allow_client_shm=True) as server:
        yield server


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The copies between device and host that the server makes itself."""
    made: list[str] = []

    def counting(name: str) -> Any:
        real = getattr(CudaLibrary, name)

        def call(self: CudaLibrary, *arguments: int) -> None:
            made.append(name)
            real(self, *arguments)

        return call

    for name in ("read", "write"):
        monkeypatch.setattr(CudaLibrary, name, counting(name))
    return made


def ask(server: Server, model: str, x: Any = X, **parameters: Any) -> Any:
    return server.infer(model, {"x": x}, parameters=parameters).outputs["y"]


def used_mib() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-i", "0"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.parametrize(
    ("model", "result"),
    [
        ("doubled", X * 2 + 1000),
        ("net_doubled_net", (X + 1) * 2 + 1),
        ("doubled_doubled_doubled", (X * 2 + 1000) * 4),
        ("net_from_host_doubled", ((X + 1) * 2 + 1000) * 2),
        ("apart_doubled_apart", (X + 1) * 2 + 1),
        ("expandable_chosen_expandable", (X * 2 + 1000) * 4),
    ],
)
def test_steps_of_an_ensemble(server: Server, copies: list[str], model: str, result: Any) -> None:
    for _ in range(3):
        np.testing.assert_array_equal(ask(server, model), result)
    assert copies == []


@pytest.mark.parametrize("targets", ["net", "doubled", "net doubled doubled net", "from_host doubled", "apart"])
def test_calls_of_other_models(server: Server, targets: str) -> None:
    expected = X
    for name in targets.split():
        expected = expected + 1 if name in ("net", "apart") else expected * 2 + 1000 * (name == "from_host")
    np.testing.assert_array_equal(ask(server, "caller", targets=targets), expected)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_regions_of_a_client_are_read_and_written_where_they_are(
    server: Server, copies: list[str], protocol: str
) -> None:
    pytest.importorskip("tritonclient.utils.cuda_shared_memory")
    port = str(getattr(server.options, f"{protocol}_port"))
    command = [sys.executable, "-c", REGIONS_CLIENT, protocol, port, "doubled", "2"]
    client = subprocess.run(command, input="5\n", capture_output=True, text=True, timeout=60, check=False)
    assert client.stdout == "done\n", client.stderr
    assert copies == []


@pytest.mark.parametrize("columns", [1, 1 << 18, 1 << 24])
def test_tensors_of_any_size(server: Server, columns: int) -> None:
    x = np.random.default_rng(0).random((2, columns), np.float32)
    np.testing.assert_array_equal(ask(server, "net_doubled_net", x), (x + 1) * 2 + 1)


@pytest.mark.skipif(NO_CUDA, reason="this onnxruntime has no CUDA")
def test_onnx_runtime_in_a_process(tmp_path: Path, copies: list[str]) -> None:
    write_onnx(tmp_path, "ort", f"{ON_GPU} {IN_PROCESS}")
    write(tmp_path, "doubled", f'backend: "python" {ON_GPU} {DEVICE_INPUTS}', DOUBLED)
    write_chain(tmp_path, "ort", "doubled", "ort")
    with serve(tmp_path) as server:
        np.testing.assert_array_equal(ask(server, "ort_doubled_ort"), X * 8)
    assert copies == []


def test_concurrent_requests_do_not_mix(server: Server) -> None:
    wrong: list[int] = []

    def run(number: int) -> None:
        for turn in range(20):
            x = np.full((1, 1 << 16), number * 100 + turn, np.float32)
            if not (ask(server, "net_doubled_net", x) == (x + 1) * 2 + 1).all():
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert wrong == []


def test_the_memory_is_returned(server: Server) -> None:
    x = np.ones((1, 1 << 20), np.float32)
    for _ in range(20):
        ask(server, "net_doubled_net", x)
        ask(server, "caller", x, targets="net doubled")
    before = used_mib()
    for _ in range(500):
        ask(server, "net_doubled_net", x)
        ask(server, "caller", x, targets="net doubled")
    end = time.monotonic() + 15
    while used_mib() - before > 64 and time.monotonic() < end:  # unused memory is freed after a while
        threading.Event().wait(0.5)
    assert used_mib() - before <= 64


def test_a_process_that_dies_disturbs_nothing_else(server: Server) -> None:
    with pytest.raises(HeadraceError, match="not healthy"):
        ask(server, "doubled", -np.ones((1, 4), np.float32))
    np.testing.assert_array_equal(ask(server, "net"), X + 1)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            np.testing.assert_array_equal(ask(server, "net_doubled_net"), (X + 1) * 2 + 1)
            break
        except HeadraceError:
            threading.Event().wait(0.2)
    else:
        pytest.fail("the model did not come back")
