"""The budget of a server: memory that belongs to no connection, its size, and its metrics."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config.options import ServerOptions
from headrace.engine import Engine
from headrace.errors import ConfigError, OutOfMemory
from headrace.models.serving_table import ServingTable
from headrace.off_loop import OffLoopWork
from headrace.telemetry import log_limits
from headrace_hosts.held_bytes import HeldBytes
from headrace_hosts.held_memory import HeldMemory, budget_of
from headrace_hosts.inflating import inflate

MIB = 1 << 20


def engine(**options: Any) -> Engine:
    return Engine(ServerOptions(**options), ServingTable())


def used(budget: HeldMemory) -> int:
    budget.recount()
    return budget.in_use_bytes


def test_memory_counts_until_nobody_refers_to_it() -> None:
    budget = HeldMemory(10 * MIB)
    memory = budget.take(4 * MIB)
    view = np.frombuffer(memory.data[MIB:], np.uint8)[5:]
    del memory
    assert used(budget) == 4 * MIB
    del view
    assert used(budget) == 0


def test_memory_counts_as_long_as_a_tensor_is_on_it() -> None:
    """NumPy lets an array on a buffer refer to the owner of the memory, and to no view between them."""
    budget = HeldMemory(10 * MIB)
    tensors = [
        np.ndarray((10,), np.uint8, view) for view in (budget.take(MIB).data[9:], budget.count_body(bytes(MIB))[9:])
    ]
    assert used(budget) == 2 * MIB
    tensors.clear()
    assert used(budget) == 0


def test_views_of_it_do_not_count_again() -> None:
    budget = HeldMemory(10 * MIB)
    memory = budget.take(MIB)
    for _ in range(10):
        memory[3:].reshape(-1, 1)
    assert used(budget) == MIB


def test_request_above_the_budget_is_refused_with_the_figures() -> None:
    budget = HeldMemory(MIB, cache_bytes=MIB // 2)
    buffer = budget.take(MIB // 4)
    with pytest.raises(OutOfMemory, match=f"{MIB // 2} bytes more are needed, .* take {MIB * 3 // 4} of the {MIB} b"):
        budget.take(MIB // 2)
    assert len(buffer) == MIB // 4
    assert budget.refused == 1


def test_a_bomb_stops_at_the_budget_and_leaves_nothing() -> None:
    budget = HeldMemory(3 * MIB)
    with pytest.raises(OutOfMemory):
        inflate(memoryview(zlib.compress(bytes(64 * MIB))), 15, 1 << 40, 1 << 40, budget.take)
    gc.collect()
    assert used(budget) == 0
    body = inflate(memoryview(zlib.compress(bytes(MIB))), 15, 1 << 40, 1 << 40, budget.take)
    assert (len(body), used(budget)) == (MIB, MIB)


def test_threads_take_and_drop_at_once() -> None:
    budget = HeldMemory(64 * MIB)

    def work() -> None:
        for size in range(1, 400):
            budget.take(size)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used(budget) == 0


def test_outputs_count_while_a_thread_packs_them() -> None:
    async def scenario() -> None:
        budget, large = HeldMemory(100), OffLoopWork()
        large.count = budget.count_packed
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        large.begin(lambda: 7, done.set_result, size_bytes=101)  # all existing memory counts
        assert used(budget) == 101
        with pytest.raises(OutOfMemory, match="a message of 5 bytes"):
            large.begin(lambda: 8, print, size_bytes=5)
        assert await done == 7
        assert used(budget) == 0
        large.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_one_budget_for_a_server_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        server = engine(memory_budget=5 << 30, workers=5)
        budget = budget_of(server)
        assert budget_of(server) is budget
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("Memory budget of requests, responses and the response cache: 1.0 GiB for each of 5 workers")
    assert budget.limit_bytes == 1 << 30
    values = {
        (sample.name, *sample.labels.values()): sample.value for each in server.collect() for sample in each.samples
    }
    assert values["headrace_memory_budget_bytes",] == 1 << 30
    assert values["headrace_memory_held_bytes", "connections"] == 0
    assert values["headrace_memory_waiting",] == values["headrace_memory_refused_total",] == 0


def test_by_default_it_is_half_of_what_is_free() -> None:
    budget = budget_of(engine())
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert budget.limit_bytes <= total // 2
    assert budget_of(engine(workers=4)).limit_bytes <= total // 8


def test_the_cache_is_part_of_it() -> None:
    cache = {"local": {"size": str(MIB)}}
    budget = budget_of(engine(cache_config=cache, memory_budget=3 * MIB))
    assert (budget.in_use_bytes, budget.largest_bytes) == (MIB, 2 * MIB)
    with pytest.raises(ConfigError, match=f"--memory-budget={MIB} leaves nothing .* cache has {MIB} bytes"):
        budget_of(engine(cache_config=cache, memory_budget=MIB))
    assert budget_of(engine(cache_config={"local": {"size": str(1 << 50)}})).largest_bytes >= 16 * MIB


def test_refusals_are_in_the_audit_log_and_a_flood_of_them_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Also for a port with its own limit."""

    class Request:
        peer = "192.0.2.7"
        refused = 0

        def refuse(self, reason: str) -> None:
            self.refused += 1

    async def scenario() -> None:
        log_limits.flush()  # what the tests before have used up
        budget, request = HeldMemory(1000), Request()
        for ledger in (budget, HeldBytes(100, budget)):
            ledger.refuse(request, "arrives slowly")
        with pytest.raises(OutOfMemory):
            budget.take(2000)
        for _ in range(50):
            budget.refuse(request, "arrives slowly")
        assert request.refused == 52
        log_limits.flush()

    with caplog.at_level(logging.INFO, "headrace.audit"):
        asyncio.run(scenario())
    lines = [each.getMessage() for each in caplog.records if each.name == "headrace.audit.memory"]
    assert lines[0].startswith("a request of 192.0.2.7 is refused: the request body arrives slowly, and there is no m")
    assert lines[2].startswith("a request is refused: there is no memory to decompress the request: 2000 bytes")
    assert len(lines) == 11
    assert lines[10].startswith("43 more lines like this were left out: ")
