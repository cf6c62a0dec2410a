"""Regions of clients in the process of a model: it maps them itself, and survives what a client does to them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from .test_shm import ALLOW, SYSTEM, post, register, segment, who_maps

if TYPE_CHECKING:
    from tests.conftest import Gate, Headrace

MODEL = """backend: "%s"
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
parameters { key: "isolation" value { string_value: "process" } }
"""
COUNT = 65536
SIZE = 4 * COUNT


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("processes")
    for name, backend in (("same", "identity"), ("waits", "gated")):
        (root / name / "1").mkdir(parents=True)
        names = MODEL.replace('"x"', '"IN"').replace('"y"', '"OUT"') if backend == "gated" else MODEL
        (root / name / "config.pbtxt").write_text(names % backend)
    return root


@pytest.fixture(scope="module")
def gate(repository: Path, make_gate: Callable[[Path], Gate]) -> Gate:
    return make_gate(repository / "waits" / "1")


@pytest.fixture(scope="module")
def server(
    keep_serving: Callable[..., Headrace], repository: Path, gate: Gate, gated_environ: Mapping[str, str]
) -> Headrace:
    return keep_serving(f"--model-repository={repository}", ALLOW, environ=gated_environ)


def infer(server: Headrace, region: str, model: str = "same", count: int = COUNT) -> tuple[int, Any]:
    """The input is at the start of the region, the output follows it."""
    place: dict[str, Any] = {"shared_memory_region": region, "shared_memory_byte_size": 4 * count}
    x, y = ("IN", "OUT") if model == "waits" else ("x", "y")
    entry = {"name": x, "shape": [count], "datatype": "FP32", "parameters": place}
    wanted = {"name": y, "parameters": {**place, "shared_memory_offset": 4 * count}}
    return post(server.http, f"/v2/models/{model}/infer", {"inputs": [entry], "outputs": [wanted]})


def numbers(descriptor: int, offset: int, count: int = COUNT) -> Any:
    return np.frombuffer(os.pread(descriptor, 4 * count, offset), np.float32)


def children(server: Headrace) -> set[str]:
    lists = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    return {number for each in lists for number in each.read_text().split()}


def test_the_process_maps_the_region_until_it_is_unregistered(
    server: Headrace, wait_until: Callable[..., None]
) -> None:
    expected = np.random.default_rng(1).random(COUNT, np.float32)
    with segment(2 * SIZE, expected.tobytes()) as (key, descriptor), segment(8192) as (unused, _):
        assert register(server.http, "r", key, 2 * SIZE)[0] == 200
        assert register(server.http, "unused", unused, 8192)[0] == 200
        for _ in range(3):
            os.pwrite(descriptor, bytes(SIZE), SIZE)
            assert infer(server, "r")[0] == 200
            assert np.array_equal(numbers(descriptor, SIZE), expected)
        mapped = set(who_maps(key))
        assert server.process.pid in mapped
        assert len(mapped) == 2, "the server, and the one process that got a request"
        assert mapped > {server.process.pid}
        assert who_maps(unused) == [server.process.pid]
        for name in ("r", "unused"):
            assert post(server.http, f"{SYSTEM}/region/{name}/unregister")[0] == 200
        wait_until(lambda: not who_maps(key), "no process has it mapped")


def test_another_segment_of_the_same_key_is_not_mistaken_for_the_registered_one(server: Headrace) -> None:
    expected = np.random.default_rng(2).random(COUNT, np.float32)
    with segment(2 * SIZE, expected.tobytes()) as (key, descriptor):
        assert register(server.http, "r", key, 2 * SIZE)[0] == 200
        path = Path(f"/dev/shm/{key}")
        path.unlink()
        path.write_bytes(bytes(2 * SIZE))
        assert infer(server, "r")[0] == 200
        assert np.array_equal(numbers(descriptor, SIZE), expected), "the registered one got the output"
        assert not any(path.read_bytes())
        assert who_maps(key) == [server.process.pid], "copied, as to any process without the region"
        assert post(server.http, f"{SYSTEM}/region/r/unregister")[0] == 200


def test_a_segment_that_shrinks_under_a_model_is_an_error_and_the_process_lives(server: Headrace, gate: Gate) -> None:
    expected = np.ones(COUNT, np.float32)
    before = children(server)
    with segment(2 * SIZE, expected.tobytes()) as (key, descriptor), ThreadPoolExecutor(1) as pool:
        for size in (4096, SIZE + 4096):  # without the input, and without the output
            os.ftruncate(descriptor, 2 * SIZE)
            os.pwrite(descriptor, expected.tobytes(), 0)
            assert register(server.http, "r", key, 2 * SIZE)[0] == 200
            gate.close()
            asking = pool.submit(infer, server, "r", "waits")
            gate.wait_until_running()
            os.ftruncate(descriptor, size)
            gate.open()
            code, answer = asking.result(60)
            assert (code, "shared memory region 'r' is lost" in answer["error"]) == (400, True)
            assert infer(server, "r", "waits")[0] == 400
            assert post(server.http, f"{SYSTEM}/region/r/unregister")[0] == 200
        assert children(server) == before


def test_a_segment_lost_only_in_the_process_is_an_error(
    server: Headrace, gate: Gate, wait_until: Callable[..., None]
) -> None:
    """The segment has its old size again before the server reads it."""
    expected = np.ones(COUNT, np.float32)
    with segment(2 * SIZE, expected.tobytes()) as (key, descriptor), ThreadPoolExecutor(1) as pool:
        assert register(server.http, "r", key, 2 * SIZE)[0] == 200
        gate.close()
        asking = pool.submit(infer, server, "r", "waits")
        gate.wait_until_running()
        assert len(who_maps(key)) == 2
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            os.ftruncate(descriptor, 0)
            gate.open()
            wait_until(lambda: who_maps(key) == [server.process.pid], "the process has pages of zeros instead")
            os.ftruncate(descriptor, 2 * SIZE)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        for code, answer in (asking.result(60), infer(server, "r")):
            assert (code, "is lost" in answer.get("error", "")) == (400, True), "until it is registered again"
        assert post(server.http, f"{SYSTEM}/region/r/unregister")[0] == 200
        os.pwrite(descriptor, expected.tobytes(), 0)
        assert register(server.http, "r", key, 2 * SIZE)[0] == 200
        assert infer(server, "r", "waits")[0] == 200
        assert np.array_equal(numbers(descriptor, SIZE), expected)
        assert post(server.http, f"{SYSTEM}/region/r/unregister")[0] == 200
