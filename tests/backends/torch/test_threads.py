"""Threads within an operator: how many each instance has, and how they wait for each other."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

CONFIG = 'input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }'
X = {"x": np.zeros(3, np.float32)}


class InNewThread:
    """Calls functions on one thread of its own."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def __call__(self, call: Any, *arguments: Any, **named: Any) -> Any:
        return self.pool.submit(call, *arguments, **named).result()


def of_group(group: str) -> str:
    return f"{CONFIG} instance_group {{ kind: KIND_CPU {group} }}"


@pytest.mark.parametrize(
    ("cores", "group", "threads"),
    [(1, "count: 1", 1), (2, "count: 1", 1), (16, "count: 1", 15), (16, "", 8), (2, "", 1), (16, "count: 5", 3)],
)
def test_cores_are_divided_and_a_single_instance_gets_all_but_one(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, cores: int, group: str, threads: int
) -> None:
    monkeypatch.setattr("headrace_engines.instance_threads.available_cores", lambda: cores)
    thread = InNewThread()
    thread(scripts.load, torch.nn.ReLU(), of_group(group))
    assert thread(torch.get_num_threads) == threads


def test_models_that_load_at_once_keep_their_own_numbers(scripts: Any) -> None:
    """PyTorch would give the last number to the thread that computes first."""
    scripts.save(torch.nn.ReLU())
    one, three, untouched = InNewThread(), InNewThread(), InNewThread()
    before = untouched(torch.get_num_threads)
    first = one(scripts.load, None, CONFIG, intra_op_thread_count=1)
    second = three(scripts.load, None, CONFIG, intra_op_thread_count=3)
    one(first.execute, X)
    three(second.execute, X)
    assert (one(torch.get_num_threads), three(torch.get_num_threads)) == (1, 3)
    assert InNewThread()(torch.get_num_threads) == before, "the program's other threads are not ours to change"


def test_a_thread_that_is_no_instances_computes_alone(scripts: Any) -> None:
    """The event loop runs short executions, for which further threads would cost more than they save."""
    own, loop = InNewThread(), InNewThread()
    instance = own(scripts.load, torch.nn.ReLU(), CONFIG, intra_op_thread_count=3)
    loop(instance.execute, X)
    own(instance.execute, X)
    assert (loop(torch.get_num_threads), own(torch.get_num_threads)) == (1, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP of GCC tells what it has read")
@pytest.mark.parametrize(
    ("variables", "policy", "spins"),
    [({}, "PASSIVE", "0"), ({"GOMP_SPINCOUNT": "77"}, "PASSIVE", "77"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE", "")],
)
def test_waiting_threads_sleep_by_default(variables: dict[str, str], policy: str, spins: str) -> None:
    code = "import os; from headrace_torch.torch_process import load_engine; load_engine(); print(dict(os.environ))"
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **variables, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"OMP_WAIT_POLICY = '{policy}'" in process.stderr
    assert f"GOMP_SPINCOUNT = '{spins}" in process.stderr
    assert [name for name in names if f"'{name}'" in process.stdout] == list(variables), "nothing is left for children"
