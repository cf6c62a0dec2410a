"""Python models in processes that give and take tensors on a GPU, which files play: protocol, lifetime, exits.

The oracle is arithmetic, and the calls of the driver in the server's process: no copy to or from the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace import Backend, DeviceTensor, HeadraceError, Instance, Model, Server, Tensors, builtins, hookimpl
from headrace.models import configuring, loader
from headrace_engines import cuda_calls
from headrace_testing.serving import serve
from tests.core.headrace_processes.played_cuda import PlayedCuda, install

pytest.importorskip("headrace_ensemble")

X = np.arange(8, dtype=np.float32).reshape(2, 4)
IO = """
max_batch_size: 64
input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }
"""
START = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2] / "core/headrace_processes")!r})
import numpy as np
import played_cuda
cuda = played_cuda.install({{folder!r}})
import triton_python_backend_utils as pb_utils
"""
#: Answers with ``x * 2`` on the device. Where its input is, by the first element: 1000 and more on the host.
DOUBLED = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            if x.is_cpu():
                array = x.as_numpy()
            else:
                assert x.__dlpack_device__() == (2, 0)
                array = played_cuda.elements(x, x.shape())
            if array.flat[0] == -1:
                os._exit(3)
            y = played_cuda.on_gpu(array * 2 + 1000 * x.is_cpu())
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("y", y)]))
        return answers
"""
#: Calls the model that the parameter `target` names, with a tensor on the device.
CALLER = """
import asyncio, json

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            tensor = pb_utils.Tensor.from_dlpack("x", played_cuda.on_gpu(x))
            parameters = json.loads(request.parameters())
            memory = pb_utils.TRITONSERVER_MEMORY_CPU if parameters.get("cpu") else pb_utils.TRITONSERVER_MEMORY_GPU
            call = pb_utils.InferenceRequest(
                model_name=parameters["target"], requested_output_names=["y"], inputs=[tensor],
                preferred_memory=pb_utils.PreferredMemory(memory, 0),
            )
            if parameters.get("how") == "stream":
                answers_of = [each for each in call.exec(decoupled=True) if each.output_tensors()]
                answer = answers_of[-1]
            elif parameters.get("how") == "async":
                async def ask():
                    return await call.async_exec()
                answer = asyncio.run(ask())
            else:
                answer = call.exec()
            if answer.has_error():
                answers.append(pb_utils.InferenceResponse(error=answer.error()))
                continue
            y = pb_utils.get_output_tensor_by_name(answer, "y")
            where = np.full_like(x, y.is_cpu())
            outputs = [pb_utils.Tensor("y", y.as_numpy()), pb_utils.Tensor("cpu", where)]
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""
#: Answers twice: with ``x`` on the device, and with ``x + 1`` there.
SENDER = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            x = played_cuda.elements(pb_utils.get_input_tensor_by_name(request, "x"), (2, 4))
            sender = request.get_response_sender()
            for added in range(2):
                y = pb_utils.Tensor.from_dlpack("y", played_cuda.on_gpu(x + added))
                sender.send(pb_utils.InferenceResponse([y]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DEVICE_INPUTS = 'parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }'
ENSEMBLE = """
platform: "ensemble" %s
ensemble_scheduling {
  step { model_name: "%s" model_version: -1 input_map { key: "x" value: "x" } output_map { key: "y" value: "t" } }
  step { model_name: "%s" model_version: -1 input_map { key: "x" value: "t" } output_map { key: "y" value: "y" } }
}
"""


class Kept(Instance):
    """Keeps its device tensors while ``received`` is a list, and answers with ``x + 1``, from where it is."""

    takes_device_tensors = True
    received: Any = None
    kinds: ClassVar[list[bool]] = []

    def execute(self, inputs: Tensors) -> Tensors:
        x: Any = inputs["x"]
        Kept.kinds.append(isinstance(x, DeviceTensor))
        if Kept.received is not None:
            Kept.received.append(x)
        return {"y": np.asarray(x) + 1}


class KeptBackend(Backend):
    name = "kept"

    def load(self, model: Model) -> Instance:
        return Kept()


def write(root: Path, name: str, config: str, code: str = "", folder: str = "") -> None:
    (root / name / "1").mkdir(parents=True)
    if code:
        (root / name / "1/model.py").write_text(START.format(folder=folder) + code)
    (root / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedCuda]:
    real = cuda_calls.CudaLibrary
    yield install(str(tmp_path_factory.mktemp("gpu")))
    cuda_calls.CudaLibrary = real  # type: ignore[misc]
    cuda_calls.cuda_library.cache_clear()


@pytest.fixture(scope="module")
def server(cuda: PlayedCuda, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root, own = tmp_path_factory.mktemp("models"), builtins.register_backends()
    folder, on_gpu = str(cuda.folder), f'backend: "python" instance_group {{ kind: KIND_GPU }} {IO}'
    write(root, "doubled", on_gpu + DEVICE_INPUTS, DOUBLED, folder)
    write(root, "from_host", on_gpu, DOUBLED, folder)
    write(root, "caller", on_gpu + 'output { name: "cpu" data_type: TYPE_FP32 dims: [ 4 ] }', CALLER, folder)
    write(root, "sender", on_gpu + DEVICE_INPUTS + "model_transaction_policy { decoupled: true }", SENDER, folder)
    write(root, "kept", f'backend: "kept" {IO}')
    write(root, "host", f'backend: "identity" {IO}')
    for first, second in (
        ("doubled", "doubled"),
        ("from_host", "doubled"),
        ("doubled", "from_host"),
        ("doubled", "kept"),
    ):
        write(root, f"{first}_{second}", ENSEMBLE % (IO, first, second))
    both = IO + 'output { name: "t" data_type: TYPE_FP32 dims: [ 4 ] }'
    write(root, "both", ENSEMBLE % (both, "doubled", "kept"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "register_backends", hookimpl(lambda: [*own, KeptBackend]))
        for module in (loader, configuring):
            patch.setattr(module, "available_gpus", lambda: (0,))
        with serve(root) as server:
            yield server


def ask(server: Server, model: str, **parameters: Any) -> Any:
    return server.infer(model, {"x": X}, parameters=parameters).outputs


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        threading.Event().wait(0.01)


def test_a_result_on_the_device_is_an_array_for_a_client(server: Server, cuda: PlayedCuda) -> None:
    cuda.done.clear()
    np.testing.assert_array_equal(ask(server, "doubled")["y"], X * 2 + 1000)
    assert cuda.done == []


def test_a_tensor_passes_from_process_to_process_on_the_device(server: Server, cuda: PlayedCuda) -> None:
    cuda.done.clear()
    np.testing.assert_array_equal(ask(server, "doubled_doubled")["y"], X * 4 + 2000)
    assert [each for each in cuda.done if each in ("DtoH", "HtoD")] == []
    assert cuda.done.count("DtoD") == 1


def test_inputs_are_on_the_host_unless_the_model_takes_them_on_the_device(server: Server, cuda: PlayedCuda) -> None:
    np.testing.assert_array_equal(ask(server, "from_host_doubled")["y"], X * 4 + 2000)
    cuda.done.clear()
    np.testing.assert_array_equal(ask(server, "doubled_from_host")["y"], X * 4 + 3000)
    assert [each for each in cuda.done if each.endswith(("toH", "toD"))] == []  # its own process has copied it


def test_an_instance_in_a_thread_reads_the_tensor_where_it_is(server: Server, cuda: PlayedCuda) -> None:
    Kept.kinds.clear()
    np.testing.assert_array_equal(ask(server, "doubled_kept")["y"], X * 2 + 1001)
    assert Kept.kinds == [True]


def test_a_tensor_that_a_client_gets_as_well_is_copied_by_its_own_process(server: Server, cuda: PlayedCuda) -> None:
    Kept.kinds.clear()
    cuda.done.clear()
    found = ask(server, "both")
    np.testing.assert_array_equal(found["t"], X * 2 + 1000)
    np.testing.assert_array_equal(found["y"], X * 2 + 1001)
    assert Kept.kinds == [True]
    assert "DtoH" not in cuda.done


@pytest.mark.parametrize(("model", "added", "on_host"), [("doubled", 0, 0), ("from_host", 1000, 0), ("host", None, 1)])
def test_bls_keeps_tensors_on_the_device(
    server: Server, cuda: PlayedCuda, model: str, added: Any, on_host: int
) -> None:
    found = ask(server, "caller", target=model)
    np.testing.assert_array_equal(found["y"], X if added is None else X * 2 + added)
    assert (found["cpu"] == on_host).all()
    found = ask(server, "caller", target=model, cpu=True)
    assert (found["cpu"] == 1).all()


@pytest.mark.parametrize(("how", "target", "result"), [("async", "doubled", X * 2), ("stream", "sender", X + 1)])
def test_every_way_to_call_keeps_tensors_on_the_device(server: Server, how: str, target: str, result: Any) -> None:
    found = ask(server, "caller", target=target, how=how)
    np.testing.assert_array_equal(found["y"], result)
    assert (found["cpu"] == 0).all()


def test_a_refused_call_is_an_answer(server: Server) -> None:
    with pytest.raises(HeadraceError, match="Model 'nowhere' is not ready"):
        ask(server, "caller", target="nowhere")


def test_memory_is_released(server: Server, cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of both processes is files."""
    Kept.received = []
    first = {name: ask(server, name) for name in ("doubled_doubled", "doubled_kept")}
    assert first
    received, Kept.received = Kept.received, None
    for _ in range(30):
        ask(server, "doubled_doubled")
        ask(server, "doubled_kept")
    files = len(list(cuda.folder.iterdir()))
    np.testing.assert_array_equal(received[0].to_host(), X * 2 + 1000)  # nothing has written over it meanwhile
    received.clear()
    for _ in range(30):
        ask(server, "doubled_doubled")
        ask(server, "doubled_kept")
    until(lambda: len(list(cuda.folder.iterdir())) <= files)  # the memory of the last requests is released soon after


def test_a_tensor_outlives_its_process(server: Server, cuda: PlayedCuda) -> None:
    Kept.received = []
    ask(server, "doubled_kept")
    (tensor,), Kept.received = Kept.received, None
    with pytest.raises(HeadraceError, match="not healthy"):
        server.infer("doubled", {"x": -np.ones((1, 4), np.float32)})
    np.testing.assert_array_equal(np.asarray(tensor), X * 2 + 1000)
    closed = cuda.done.count("close")
    del tensor
    until(lambda: cuda.done.count("close") == closed + 1)
    np.testing.assert_array_equal(ask(server, "doubled_doubled")["y"], X * 4 + 2000)
