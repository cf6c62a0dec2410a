"""Models on a real GPU behind a real server: placement, memory, faults, metrics. Oracles: arithmetic and nvidia-smi."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc
import tritonclient.http
from onnx import TensorProto, helper, numpy_helper

from headrace_testing.serving import serve as serve_here
from tests.e2e.conftest import call

if TYPE_CHECKING:
    from tests.conftest import Headrace

torch = pytest.importorskip("torch")
onnxruntime = pytest.importorskip("onnxruntime")

ON_GPU = "instance_group { kind: KIND_GPU }"
NO_CUDA = "CUDAExecutionProvider" not in onnxruntime.get_available_providers()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch finds no GPU"),
]
ENGINES = ["torch", pytest.param("onnx", marks=pytest.mark.skipif(NO_CUDA, reason="this onnxruntime has no CUDA"))]

TORCH = """
import os
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Buffer(torch.full((%(size)d,), 2.0))

    def forward(self, x):
        if x.flatten()[0] == -1:  # more than any GPU has
            return x + torch.ones(1 << 46, device=x.device).sum()
        assert x.is_cuda
        return x * self.weight[0]
"""
IO = """
max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
PYTHON = """
import torch
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            assert x.is_cpu()  # FORCE_CPU_ONLY_INPUT_TENSORS is yes by default
            doubled = torch.from_dlpack(x.to_dlpack()).cuda() * 2
            y = pb_utils.Tensor.from_dlpack("y", torch.utils.dlpack.to_dlpack(doubled))
            assert not y.is_cpu()
            given = [pb_utils.Tensor.from_dlpack("x", doubled)]
            asked = pb_utils.InferenceRequest(model_name="torch", requested_output_names=["y"], inputs=given)
            again = pb_utils.get_output_tensor_by_name(asked.exec(), "y")
            back = torch.from_dlpack(again.to_dlpack())
            answers.append(pb_utils.InferenceResponse([y, pb_utils.Tensor.from_dlpack("z", back.cuda())]))
        return answers
"""


DOUBLED = """
import torch


class Net(torch.nn.Module):
    def forward(self, x):
        assert x.is_cuda
        return x * 2
"""
SLOWLY_DOUBLED = DOUBLED.replace("assert x.is_cuda", "torch.cuda._sleep(4_000_000)  # cycles: some 2 ms")
BATCHING = "dynamic_batching { }"
#: The stock client: sends as many requests as each line has, through its own CUDA regions, and prints "done".
REGIONS_CLIENT = """
import importlib
import sys

import numpy as np
from tritonclient.utils import cuda_shared_memory as shm

client = importlib.import_module(f"tritonclient.{sys.argv[1]}")
given = np.arange(16, dtype=np.float32).reshape(4, 4)
handles = {name: shm.create_shared_memory_region(name, 64, 0) for name in ("in", "out")}
with client.InferenceServerClient(f"127.0.0.1:{sys.argv[2]}") as server:
    for name, handle in handles.items():
        server.register_cuda_shared_memory(name, shm.get_raw_handle(handle), 0, 64)
    tensor, wanted = client.InferInput("x", [4, 4], "FP32"), client.InferRequestedOutput("y")
    tensor.set_shared_memory("in", 64)
    wanted.set_shared_memory("out", 64)
    for line in sys.stdin:
        for number in range(int(line)):
            shm.set_shared_memory_region(handles["in"], [given + number])
            server.infer(sys.argv[3], [tensor], outputs=[wanted])
            found = shm.get_contents_as_numpy(handles["out"], np.float32, [4, 4])
            np.testing.assert_array_equal(found, (given + number) * float(sys.argv[4]))
        print("done", flush=True)
    server.unregister_cuda_shared_memory()
for handle in handles.values():
    shm.destroy_shared_memory_region(handle)
"""


def write_torch(root: Path, name: str, group: str = ON_GPU, size: int = 4) -> None:
    version = root / name / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(TORCH % {"size": size})
    (root / name / "config.pbtxt").write_text(
        f'backend: "pytorch" runtime: "model.py" dynamic_batching {{ }} {IO} {group}'
    )


def write_onnx(root: Path, name: str, group: str = ON_GPU, size: int = 4) -> None:
    """``y`` is ``x * 2``; the weights are as many floats as ``size``."""
    version = root / name / "1"
    version.mkdir(parents=True)
    weight = numpy_helper.from_array(np.full(size, 2, np.float32), "w")
    first = numpy_helper.from_array(np.array([0], np.int64), "i")
    io = [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["n", 4]) for each in "xy"]
    nodes = [helper.make_node("Gather", ["w", "i"], ["t"]), helper.make_node("Mul", ["x", "t"], ["y"])]
    # The weights are read by their index: they can not be folded into a constant of one element.
    graph = helper.make_graph(nodes, "g", io[:1], io[1:], [weight, first])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), version / "model.onnx"
    )
    level = "optimization { graph { level: 2 } }" if size > 4 else ""
    (root / name / "config.pbtxt").write_text(f'backend: "onnxruntime" dynamic_batching {{ }} {level} {IO} {group}')


WRITE: dict[str, Callable[..., None]] = {"torch": write_torch, "onnx": write_onnx}


def used_mib() -> int:
    """Return the used memory of GPU 0 by nvidia-smi, in MiB."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.check_output(query, text=True))


def body(*values: float) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": values}]}


def asked(server: Headrace, model: str, *values: float) -> list[float]:
    reply = call(server, f"/v2/models/{model}/infer", body(*values))
    assert reply.status == 200, reply.body
    data: list[float] = json.loads(reply.body)["outputs"][0]["data"]
    return data


@pytest.fixture(scope="module")
def served(keep_serving: Callable[..., Headrace], tmp_path_factory: pytest.TempPathFactory) -> Headrace:
    root = tmp_path_factory.mktemp("models")
    for engine, write in WRITE.items():
        if engine == "onnx" and NO_CUDA:
            continue
        write(root, engine, "instance_group { kind: KIND_GPU count: 2 }")
        write(root, f"{engine}_auto", "")
        write(root, f"{engine}_absent", "instance_group { gpus: [ 7 ] }")
        write(root, f"{engine}_large", size=1 << 28)  # 1 GiB
    (root / "python" / "1").mkdir(parents=True)
    (root / "python" / "1" / "model.py").write_text(PYTHON)
    third = 'output { name: "z" data_type: TYPE_FP32 dims: [ 4 ] }'
    (root / "python" / "config.pbtxt").write_text(f'backend: "python" {IO} {third}')
    names = [path.name for path in root.iterdir() if not path.name.endswith(("_large", "_absent"))]
    loads = [f"--load-model={name}" for name in names]
    return keep_serving(
        f"--model-repository={root}", "--model-control-mode=explicit", "--allow-client-shm=true", *loads
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_answers_are_those_of_arithmetic_over_both_protocols(served: Headrace, engine: str) -> None:
    values = np.arange(256, dtype=np.float32).reshape(64, 4)
    for module, port in ((tritonclient.http, served.http), (tritonclient.grpc, served.grpc)):
        with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            tensor = module.InferInput("x", [64, 4], "FP32")
            tensor.set_data_from_numpy(values)
            for model in (engine, f"{engine}_auto"):
                outputs = client.infer(model, [tensor]).as_numpy("y")
                np.testing.assert_array_equal(outputs, values * 2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_without_groups_is_placed_on_the_gpu(served: Headrace, engine: str) -> None:
    status, text = served.get(f"/v2/models/{engine}_auto/config")
    assert status == 200
    assert [(group["kind"], group["gpus"]) for group in json.loads(text)["instance_group"]] == [("KIND_GPU", [0])]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_gpu_that_is_not_there_is_named(served: Headrace, engine: str) -> None:
    reply = call(served, f"/v2/repository/models/{engine}_absent/load", {})
    assert reply.status == 400
    assert "invalid or unsupported gpu id 7" in reply.error


def test_memory_that_runs_out_fails_one_request_and_neither_others_nor_the_instance(served: Headrace) -> None:
    reply = call(served, "/v2/models/torch/infer", body(-1, 0, 0, 0))
    assert reply.status == 500
    assert "out of memory" in reply.error
    assert asked(served, "torch", 1, 2, 3, 4) == [2, 4, 6, 8]


@pytest.mark.parametrize("engine", ENGINES)
def test_unloading_returns_memory(served: Headrace, engine: str, wait_until: Callable[..., None]) -> None:
    call(served, f"/v2/repository/models/{engine}_large/load", {})  # once: libraries and kernels stay
    assert asked(served, f"{engine}_large", 1, 2, 3, 4) == [2, 4, 6, 8]
    call(served, f"/v2/repository/models/{engine}_large/unload", {})
    served_before = used_mib()
    reply = call(served, f"/v2/repository/models/{engine}_large/load", {})
    assert reply.status == 200, reply.body
    assert asked(served, f"{engine}_large", 1, 2, 3, 4) == [2, 4, 6, 8]
    loaded = used_mib()
    assert loaded - served_before >= 1000, (served_before, loaded)
    call(served, f"/v2/repository/models/{engine}_large/unload", {})
    wait_until(lambda: used_mib() <= served_before + 100, "the GPU has its memory back", 10)


def test_gauges_are_those_of_nvidia_smi(served: Headrace) -> None:
    pytest.importorskip("pynvml")
    _, page = served.get("/metrics", served.ports["Metrics Service"])
    gauges = dict(
        re.findall(r'^(nv_gpu_\w+|nv_energy\w+){gpu_uuid="GPU-[0-9a-f-]+"} (\S+)$', page.decode(), re.MULTILINE)
    )
    assert float(gauges["nv_gpu_memory_used_bytes"]) / 2**20 == pytest.approx(used_mib(), abs=700)
    assert {"nv_gpu_utilization", "nv_gpu_memory_total_bytes", "nv_gpu_power_usage", "nv_energy_consumption"} <= set(
        gauges
    )


def test_a_python_model_takes_and_gives_tensors_of_the_gpu_and_calls_a_model_there(served: Headrace) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{served.http}") as client:
        tensor = tritonclient.http.InferInput("x", [1, 4], "FP32")
        tensor.set_data_from_numpy(np.array([[1, 2, 3, 4]], np.float32))
        response = client.infer("python", [tensor])
    np.testing.assert_array_equal(response.as_numpy("y"), [[2, 4, 6, 8]])
    np.testing.assert_array_equal(response.as_numpy("z"), [[4, 8, 12, 16]])


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_the_stock_clients_cuda_regions_are_read_and_written(served: Headrace, protocol: str) -> None:
    shm = pytest.importorskip("tritonclient.utils.cuda_shared_memory")
    module: Any = tritonclient.http if protocol == "http" else tritonclient.grpc
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    with module.InferenceServerClient(f"127.0.0.1:{getattr(served, protocol)}") as client:
        handles = {name: shm.create_shared_memory_region(name, 64, 0) for name in ("in", "out")}
        try:
            shm.set_shared_memory_region(handles["in"], [values])
            for name, handle in handles.items():
                client.register_cuda_shared_memory(name, shm.get_raw_handle(handle), 0, 64)
            tensor, wanted = module.InferInput("x", [4, 4], "FP32"), module.InferRequestedOutput("y")
            tensor.set_shared_memory("in", 64)
            wanted.set_shared_memory("out", 64)
            client.infer("torch", [tensor], outputs=[wanted])
            np.testing.assert_array_equal(shm.get_contents_as_numpy(handles["out"], np.float32, [4, 4]), values * 2)
        finally:
            client.unregister_cuda_shared_memory()
            for handle in handles.values():
                shm.destroy_shared_memory_region(handle)


def write_chain(root: Path, code: str = DOUBLED) -> None:
    """Models of PyTorch and ONNX Runtime that double, and an ensemble of them: times 8."""
    for name in ("doubled", "first", "last", "chain"):
        (root / name / "1").mkdir(parents=True)
    (root / "doubled" / "1" / "model.py").write_text(code)
    (root / "doubled" / "config.pbtxt").write_text(f'backend: "pytorch" runtime: "model.py" {BATCHING} {IO} {ON_GPU}')
    io = [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["n", 4]) for each in "xy"]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", io[:1], io[1:])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
    for name in ("first", "last"):
        onnx.save(proto, root / name / "1" / "model.onnx")
        (root / name / "config.pbtxt").write_text(f'backend: "onnxruntime" {BATCHING} {IO} {ON_GPU}')
    steps = ", ".join(
        f'{{ model_name: "{name}" model_version: -1 input_map {{ key: "x" value: "{x}" }} '
        f'output_map {{ key: "y" value: "{y}" }} }}'
        for name, x, y in (("first", "x", "t"), ("doubled", "t", "u"), ("last", "u", "y"))
    )
    (root / "chain" / "config.pbtxt").write_text(
        f'platform: "ensemble" {IO} ensemble_scheduling {{ step [ {steps} ] }}'
    )


@pytest.mark.skipif(NO_CUDA, reason="this onnxruntime has no CUDA")
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # PyTorch 2.11 warns once per process
@pytest.mark.parametrize("code", [DOUBLED, SLOWLY_DOUBLED], ids=["fast", "slow"])
def test_tensors_pass_between_engines_on_the_gpu(tmp_path: Path, code: str) -> None:
    """With a slow model, a reader that does not wait for its writer reads old memory, and so does one whose input is
    freed too early."""
    from tests.backends.torch.test_gpu_tensors import copies_of

    write_chain(tmp_path, code)
    with serve_here(tmp_path) as server:

        def ask(number: int) -> None:
            x = np.full((1 + number % 3, 4), number, np.float32)
            np.testing.assert_array_equal(np.asarray(server.infer("chain", {"x": x}).outputs["y"]), x * 8)

        ask(1)  # compiles what PyTorch compiles in the first executions
        copies = copies_of(lambda: list(map(ask, range(5))))
        print("copies of 5 requests from onnxruntime to pytorch to onnxruntime:", dict(copies))
        assert (copies["HtoD"], copies["DtoH"]) == (5, 5)
        with ThreadPoolExecutor(16) as callers:
            list(callers.map(ask, range(400 if code == DOUBLED else 100)))


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # PyTorch 2.11 warns once per process
@pytest.mark.parametrize(("model", "factor"), [("doubled", 2), ("last", 2), ("chain", 8)])
@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tensors_in_cuda_regions_are_not_copied_to_the_host(
    tmp_path: Path, protocol: str, model: str, factor: int
) -> None:
    pytest.importorskip("tritonclient.utils.cuda_shared_memory")
    from tests.backends.torch.test_gpu_tensors import copies_of

    if NO_CUDA and model != "doubled":
        pytest.skip("this onnxruntime has no CUDA")
    write_chain(tmp_path)
    loads = ["first", "doubled", "last", "chain"] if model == "chain" else [model]
    options: Any = {"model_control_mode": "explicit", "load_model": loads}
    with serve_here(tmp_path, listen=True, allow_client_shm=True, **options) as server:
        port = getattr(server.options, f"{protocol}_port")
        command = [sys.executable, "-c", REGIONS_CLIENT, protocol, str(port), model, str(factor)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdin is not None
            assert client.stdout is not None
            asking, answers = client.stdin, client.stdout

            def ask() -> None:
                asking.write("5\n")
                asking.flush()
                assert answers.readline() == "done\n", "the client's error is above"

            ask()  # compiles what PyTorch compiles in the first executions
            copies = copies_of(ask)
            client.stdin.close()
            assert client.wait(60) == 0
        print(f"copies of 5 requests to {model} through CUDA regions:", dict(copies))
        assert set(copies) <= {"DtoD"}
        x = np.ones((1, 4), np.float32)
        by_wire = copies_of(lambda: server.infer(model, {"x": x}))
        assert by_wire["HtoD"] == by_wire["DtoH"] == 1, "the GPU lives, and its copies are counted"


def test_a_gpu_that_is_too_full_takes_no_model(serve: Callable[..., Headrace], tmp_path: Path) -> None:
    write_torch(tmp_path, "m")
    flags = ["--model-control-mode=explicit", "--model-load-gpu-limit=0:0.000001"]
    reply = call(serve(f"--model-repository={tmp_path}", *flags), "/v2/repository/models/m/load", {})
    assert "memory limit set for GPU 0 has exceeded" in reply.error


@pytest.mark.parametrize("engine", ENGINES)
def test_models_on_demand_stay_within_the_budget_of_the_gpu(
    serve: Callable[..., Headrace], tmp_path: Path, engine: str, wait_until: Callable[..., None]
) -> None:
    """Room for two of four models of 256 MiB. The configs say what one takes: the files of PyTorch's do not have the
    weights, and ONNX Runtime's arena takes 660 MiB."""
    charge = {"torch": 280, "onnx": 700}[engine]
    names = ["a", "b", "c", "d"]
    for name in names:
        parameter = f'parameters {{ key: "control.gpu_memory" value {{ string_value: "{charge}MiB" }} }}'
        WRITE[engine](tmp_path, name, f"{ON_GPU} {parameter}", size=1 << 26)
    server = serve(
        f"--model-repository={tmp_path}",
        "--model-control-mode=on-demand",
        f"--on-demand-gpu-memory=0:{charge * 5 // 2}MiB",
    )
    assert asked(server, "a", 1, 2, 3, 4) == [2, 4, 6, 8]
    first = used_mib()  # with the libraries, which are no part of the budget
    seen = [first]
    for name in [*names[1:], *names]:
        assert asked(server, name, 1, 2, 3, 4) == [2, 4, 6, 8]
        seen.append(used_mib())
        print(f"MiB of the GPU with models of 256 MiB on {engine}, two at a time:", seen)
        wait_until(
            lambda: used_mib() <= first + charge + 100, f"one more model than {first} MiB had, with '{name}'", 10
        )
        reply = call(server, "/v2/repository/index", {})
        loaded = [each["name"] for each in json.loads(reply.body) if each.get("state") == "READY"]
        assert name in loaded
        assert len(loaded) <= 2
    assert used_mib() >= first + 200, "two models are there"
