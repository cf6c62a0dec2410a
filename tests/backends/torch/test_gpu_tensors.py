"""Tensors that stay on the GPU between models: counted by PyTorch's profiler, and right under load."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from headrace import LoadError, Server, StackedTensors
from headrace_testing.serving import serve
from headrace_torch.torch_tensors import TorchTensor
from tests.backends.torch.chains import CHAIN, write_chain

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch finds no GPU"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

X = np.arange(8, dtype=np.float32).reshape(2, 4)
REQUESTS = 5
SLOW = """
class Net(torch.nn.Module):
    def forward(self, x):
        torch.cuda._sleep(20_000_000)  # cycles: some 10 ms, in which a reader that does not wait reads old memory
        return x + 1
"""
ONE = 'max_batch_size: 8 input { name: "x" data_type: TYPE_FP32 dims: [-1] } '
ONE += 'output { name: "y" data_type: TYPE_FP32 dims: [-1] } '


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("models")
    write_chain(repository, "KIND_GPU")
    with serve(repository) as server:
        for _ in range(5):  # PyTorch compiles in the first executions
            server.infer("chain", {"x": X})
        yield server


def copies_of(work: Any) -> Counter[str]:
    """Return how many copies of each kind the GPU makes during ``work``."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        work()
        torch.cuda.synchronize()
    names = [each.name for each in profile.events() or () if each.name.startswith("Memcpy")]
    return Counter(name.split()[1] for name in names)


def test_a_request_of_a_chain_is_copied_once_in_and_once_out(server: Server) -> None:
    def ask() -> None:
        for number in range(REQUESTS):
            found = server.infer("chain", {"x": X + number}).outputs["y"]
            np.testing.assert_array_equal(np.asarray(found), CHAIN(X + number))

    found = copies_of(ask)
    print("copies of", REQUESTS, "requests of a chain of three models:", dict(found))
    within = found.pop("DtoD", 0)  # for models that may write to their inputs
    assert found == {"HtoD": REQUESTS, "DtoH": REQUESTS}
    assert within <= 2 * REQUESTS


def test_a_single_model_is_copied_once_in_and_once_out(server: Server) -> None:
    found = copies_of(lambda: server.infer("script", {"x": X}))
    assert found == {"HtoD": 1, "DtoH": 1}


def test_many_requests_at_once_get_their_own_rows(server: Server) -> None:
    def ask(number: int) -> None:
        x = np.full((1 + number % 3, 4), number, np.float32)
        np.testing.assert_array_equal(np.asarray(server.infer("chain", {"x": x}).outputs["y"]), CHAIN(x))

    with ThreadPoolExecutor(16) as callers:
        list(callers.map(ask, range(400)))


def test_a_reader_waits_for_the_writer_on_another_stream(modules: Any) -> None:
    """The tensor is passed on before it is computed, and its memory is not reused before it is read."""
    writer = modules.load(SLOW, ONE, device="gpu")
    reader = modules.load(SLOW.replace("x + 1", "x * 2"), ONE, device="gpu")
    x = np.ones((1, 1 << 20), np.float32)
    for number in range(10):
        result: Any = writer.execute({"x": x * number})["y"]
        assert isinstance(result, TorchTensor)
        twice: Any = reader.execute({"x": result})["y"]
        stacked: Any = reader.execute({"x": StackedTensors([result[:1], x])})["y"]
        del result
        writer.execute({"x": x * 1000})  # may take the memory of `left` as soon as it is free
        np.testing.assert_array_equal(twice.to_host(), x * 2 * (number + 1))
        np.testing.assert_array_equal(stacked.to_host(), np.concatenate([x * 2 * (number + 1), x * 2]))


def test_another_library_reads_it_by_dlpack_on_its_own_stream(modules: Any) -> None:
    result: Any = modules.load(SLOW, ONE, device="gpu").execute({"x": X})["y"]
    assert result.__dlpack_device__() == (2, 0)
    found: list[Any] = []

    def read() -> None:  # on another thread, whose current stream is the default one
        found.append(torch.utils.dlpack.from_dlpack(result).cpu().numpy())

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(found[0], X + 1)
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Stream(non_blocking=True):
        np.testing.assert_array_equal(cupy.asnumpy(cupy.from_dlpack(result)), X + 1)
    # The stream is destroyed before the tensor.


BUSY = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1024, 1024)
        torch.nn.init.eye_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, x):
        for _ in range(40):
            x = self.layer(x)
        return x + 1
"""
WIDE = 'max_batch_size: 64 input { name: "x" data_type: TYPE_FP32 dims: [1024] } '
WIDE += 'output { name: "y" data_type: TYPE_FP32 dims: [1024] } '
GRAPHS = "optimization { cuda { graphs: true } } "


def wide(number: int, rows: int = 1) -> Any:
    return np.full((rows, 1024), number, np.float32)


@pytest.mark.parametrize("more", ["", GRAPHS])
def test_calls_that_overlap_get_their_own_rows(modules: Any, more: str) -> None:
    """Results equal those of sequential calls, and later calls do not overwrite them."""
    instance = modules.load(BUSY, WIDE + more, device="gpu")
    instance.warm_up()
    assert instance.concurrency == 2
    results: list[tuple[int, Any]] = []

    def ask(number: int) -> None:
        instance.wait_to_take()
        rows = 1 + number % 64
        parts = StackedTensors([wide(number, rows - rows // 2), wide(number, rows // 2)]) if rows > 1 else wide(number)
        result: Any = instance.execute({"x": parts})["y"]
        results.append((number, result.to_host()))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(ask, range(300)))
    for number, found in results:
        np.testing.assert_array_equal(found, wide(number + 1, 1 + number % 64))


def test_copies_of_a_large_batch_are_pinned(modules: Any) -> None:
    instance = modules.load(BUSY, WIDE.replace("64", "256"), device="gpu")
    parts: Any = StackedTensors([wide(number, 64) for number in range(4)])

    def ask() -> None:
        result: Any = instance.execute({"x": parts})["y"]
        np.testing.assert_array_equal(result.to_host(), parts.to_host() + 1)

    ask()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        ask()
        torch.cuda.synchronize()
    names = Counter(each.name for each in profile.events() or () if each.name.startswith("Memcpy"))
    print(dict(names))
    assert names == {"Memcpy HtoD (Pinned -> Device)": 1, "Memcpy DtoH (Device -> Pinned)": 1}


def test_a_batch_is_one_launch_with_graphs(modules: Any) -> None:
    launches = {}
    for more in ("", GRAPHS):
        instance = modules.load(BUSY, WIDE + more, device="gpu")
        instance.warm_up()
        x = wide(3, 5)

        def ask(instance: Any = instance, x: Any = x) -> None:
            np.testing.assert_array_equal(instance.execute({"x": x})["y"].to_host(), x + 1)

        ask()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            ask()
        launches[more] = (
            len([each for each in profile.events() or () if each.name == "cudaGraphLaunch"]),
            len([each for each in profile.events() or () if each.name in ("aten::linear", "aten::addmm")]),
        )
        modules.close(instance)
    print(launches)
    assert launches[""][1] >= 40
    assert launches[GRAPHS][1] == 0


@pytest.mark.parametrize("code", ["x.sum().item() * x", "x.cpu().cuda()", "x + torch.ones(1).cuda()"])
def test_the_gpu_survives_a_failed_capture(modules: Any, code: str) -> None:
    text = f"class Net(torch.nn.Module):\n    def forward(self, x):\n        return {code}\n"
    instance = modules.load(text, ONE.replace("[-1]", "[4]") + GRAPHS, device="gpu")
    with pytest.raises(LoadError, match="cannot be captured") as found:
        instance.warm_up()
    print(found.value.message)
    assert torch.rand(3, device="cuda").shape == (3,), "random numbers wait for no capture"
    allocated = []
    for _ in range(20):  # memory that another stream has read is free again
        part = torch.ones(1 << 20, device="cuda")
        part.record_stream(torch.cuda.Stream())  # type: ignore[no-untyped-call]
        del part
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[-1] <= allocated[3] + (1 << 21), allocated
    again: Any = modules.load(text, ONE.replace("[-1]", "[4]"), device="gpu").execute({"x": X})["y"]
    assert again.to_host().shape == X.shape


def test_captures_while_another_model_is_served(modules: Any, server: Server) -> None:
    """Another model's thread allocates and waits meanwhile: neither disturbs the other.

    It failed when it last ran on a GPU, before calls waited for the end of a capture.
    """
    done = threading.Event()
    failed: list[BaseException] = []

    def serve_others() -> None:
        while not done.is_set():
            try:
                np.testing.assert_array_equal(np.asarray(server.infer("chain", {"x": X}).outputs["y"]), CHAIN(X))
            except BaseException as error:
                failed.append(error)

    thread = threading.Thread(target=serve_others)
    thread.start()
    try:
        for _ in range(3):
            instance = modules.load(BUSY, WIDE + GRAPHS, device="gpu")
            instance.warm_up()
            found: Any = instance.execute({"x": wide(1, 3)})["y"]
            np.testing.assert_array_equal(found.to_host(), wide(2, 3))
            modules.close(instance)
    finally:
        done.set()
        thread.join()
    assert failed == []
