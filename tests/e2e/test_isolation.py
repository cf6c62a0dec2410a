"""A real server whose models have processes of their own, seen from outside: chaos, orphans, leaks, names."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.conftest import Gate, Headrace
    from tests.e2e.conftest import Reply

    Start = Callable[..., Headrace]
    AddModel = Callable[..., Path]
    WaitUntil = Callable[..., None]

APART = 'parameters { key: "isolation" value { string_value: "process" } }'


def echo_of(instances: int = 1) -> str:
    """A model whose answers differ."""
    return f"""backend: "identity" {APART} instance_group {{ kind: KIND_CPU count: {instances} }}
        input {{ name: "IN" data_type: TYPE_FP32 dims: [-1] }}
        output {{ name: "OUT" data_type: TYPE_FP32 dims: [-1] }}"""


def state(pid: int) -> tuple[str, int]:
    """The state of a process, and its parent."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return words[0], int(words[1])


def exists(pid: int) -> bool:
    try:
        return state(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descendants(pid: int) -> set[int]:
    """Everything that ``pid`` and its children have started, and that still runs."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and exists(int(entry.name)):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                parents[int(entry.name)] = state(int(entry.name))[1]
    pids = {pid}
    while more := {child for child, parent in parents.items() if parent in pids} - pids:
        pids |= more
    return pids - {pid}


def command_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def children(server: Headrace) -> set[int]:
    """The processes of its instances."""
    processes = descendants(server.process.pid)
    return {pid for pid in processes if any(word.endswith("bootstrap.py") for word in command_of(pid))}


def count_fds(server: Headrace) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def count_threads(server: Headrace) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/task").iterdir()))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models"


@pytest.fixture
def shared() -> set[str]:
    """Return the files under /dev/shm before the test."""
    return {entry.name for entry in Path("/dev/shm").iterdir()}


# ---------------------------------------------------------------------- chaos


def ask(client: Any, number: int, seen: Counter[str]) -> None:
    """One request. Its answer must be its own, or an error that permits to send it again."""
    values = np.full(4, number, np.float32) if number % 5 else np.full(50_000, number, np.float32)
    tensor = triton.InferInput("IN", list(values.shape), "FP32")
    tensor.set_data_from_numpy(values)
    try:
        response = client.infer("echo", [tensor], request_id=str(number))
    except InferenceServerException as error:
        refused = error
    else:
        assert response.get_response()["id"] == str(number)
        assert np.array_equal(response.as_numpy("OUT"), values)
        seen["ok"] += 1
        return
    assert refused.status() == "503", refused
    assert "is not healthy" in refused.message(), refused
    seen["unavailable"] += 1


def has(seen: Counter[str], count: int) -> bool:
    return seen["ok"] >= count


def test_every_request_is_answered_once_while_processes_are_killed_at_random(
    serve: Start, root: Path, add_model: AddModel, wait_until: WaitUntil, shared: set[str]
) -> None:
    add_model(root, "echo", echo_of(2))
    server = serve(f"--model-repository={root}")
    wait_until(lambda: len(children(server)) == 2, "both instances have a process")
    fds = count_fds(server)
    over, seen = threading.Event(), Counter[str]()

    def call(caller: int) -> int:
        count = 0
        with triton.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
            while not over.is_set():
                ask(client, caller * 100_000 + count, seen)
                count += 1
        return count

    choose = random.Random(3)
    with ThreadPoolExecutor(16) as pool:
        callers = [pool.submit(call, caller) for caller in range(16)]
        for _ in range(4):  # with two instances, none dies often enough for a pause
            enough = seen["ok"] + 50
            wait_until(partial(has, seen, enough), "requests are served")
            wait_until(lambda: len(children(server)) > 0, "there is a process")
            os.kill(choose.choice(sorted(children(server))), signal.SIGKILL)
        over.set()
        total = sum(each.result(30) for each in callers)
    assert seen["ok"] + seen["unavailable"] == total
    wait_until(lambda: server.get("/v2/models/echo/ready")[0] == 200, "the model is ready again")
    wait_until(lambda: len(children(server)) == 2, "both instances have a process again")
    server.wait_until_metric("nv_model_instance_restart_count", "echo", 4)
    wait_until(lambda: count_fds(server) <= fds + 4, "no descriptor is left over", 30)
    assert {entry.name for entry in Path("/dev/shm").iterdir()} == shared


# ---------------------------------------------------------------------- orphans


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_no_process_outlives_its_server(
    run_headrace: Start, root: Path, add_model: AddModel, wait_until: WaitUntil, number: int
) -> None:
    add_model(root, "echo", echo_of(2))
    server = run_headrace(f"--model-repository={root}").wait_until_ready()
    family = descendants(server.process.pid)
    assert len(children(server)) == 2
    assert len(family) >= 3  # and the orphan reaper
    assert server.finish(number) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    wait_until(lambda: not any(map(exists, family)), "all have gone", 30)


def test_a_process_that_hangs_does_not_outlive_its_server(
    run_headrace: Start, root: Path, add_model: AddModel, wait_until: WaitUntil
) -> None:
    """It cannot detect that the server has exited; the orphan reaper does."""
    add_model(root, "echo", echo_of())
    server = run_headrace(f"--model-repository={root}").wait_until_ready()
    family = descendants(server.process.pid)
    for pid in children(server):
        os.kill(pid, signal.SIGSTOP)
    server.finish(signal.SIGKILL)
    wait_until(lambda: not any(map(exists, family)), "all have gone", 30)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_while_a_process_loads_leaves_no_process(
    run_headrace: Start,
    root: Path,
    add_model: AddModel,
    gated: Mapping[str, str],
    echo: str,
    make_gate: Callable[[Path], Gate],
    wait_until: WaitUntil,
    number: int,
) -> None:
    path = add_model(root, "slow", f'backend: "gated" {APART}{echo}')
    (path / "loading").touch()
    server = run_headrace(f"--model-repository={root}", "--exit-timeout-secs=2", environ=gated)
    make_gate(path).wait_until_loading()
    family = descendants(server.process.pid)
    assert family
    begun = time.monotonic()
    server.finish(number)
    assert time.monotonic() - begun < 60  # the load would go on for ever
    wait_until(lambda: not any(map(exists, family)), "all have gone", 30)


# ---------------------------------------------------------------------- cycles


def test_cycles_of_load_and_unload_leave_no_processes_or_descriptors(
    serve: Start, root: Path, add_model: AddModel, post: Callable[..., Reply], infer: Any, wait_until: WaitUntil
) -> None:
    add_model(root, "echo", echo_of())
    server = serve(f"--model-repository={root}", "--model-control-mode=explicit")

    def cycle() -> None:
        assert post(server, "/v2/repository/models/echo/load", {}).status == 200
        assert infer(server) == [1.0, 2.0]
        assert post(server, "/v2/repository/models/echo/unload", {}).status == 200
        wait_until(lambda: not children(server), "its process has ended")

    for _ in range(3):
        cycle()
    fds, threads, rss = count_fds(server), count_threads(server), server.rss_bytes
    for _ in range(17):
        cycle()
    wait_until(lambda: count_fds(server) <= fds + 2, f"no more than {fds} descriptors", 30)
    wait_until(lambda: count_threads(server) <= threads + 2, f"no more than {threads} threads", 30)
    server.wait_until_rss(rss + (8 << 20))


# ---------------------------------------------------------------------- security


NAMES = ["-m", "a;touch MARK", "`touch MARK`", "$(touch MARK)", "a b'\"c", "--help"]


@pytest.mark.parametrize("place", ["model", "instance"])
def test_no_name_reaches_a_shell_or_is_taken_for_an_option(
    run_headrace: Start, root: Path, add_model: AddModel, place: str, wait_until: WaitUntil
) -> None:
    """docs/spec/security.md C4: a name is one argument of a list, whatever it holds."""
    names = [*NAMES, "new\nline"] if place == "instance" else NAMES
    for index, name in enumerate(names):
        config = echo_of()
        if place == "instance":
            quoted = json.dumps(name)
            config = config.replace("kind: KIND_CPU", f"name: {quoted} kind: KIND_CPU")
        add_model(root, name if place == "model" else f"m{index}", config)
    server = run_headrace(f"--model-repository={root}", "--exit-on-error=false").wait_until_ready()
    wait_until(lambda: len(children(server)) == len(names), "each has its process", 30)
    commands = [command_of(pid) for pid in children(server)]
    assert sorted(each[2] for each in commands) == sorted(
        f"{name}_0_0" if place == "model" else f"{name}_0" for name in names
    )
    assert not list(Path.cwd().glob("MARK*"))
    assert not list(root.rglob("MARK*"))
    server.stop()


def test_an_error_discloses_nothing_about_the_server(
    serve: Start,
    root: Path,
    add_model: AddModel,
    gated: Mapping[str, str],
    echo: str,
    make_gate: Callable[[Path], Gate],
    post: Callable[..., Reply],
) -> None:
    """docs/spec/security.md C7: how the process ended, and nothing that an attacker could use."""
    gate = make_gate(add_model(root, "slow", f'backend: "gated" {APART}{echo}'))
    server = serve(f"--model-repository={root}", environ=gated)
    gate.close()
    tensor = {"name": "IN", "datatype": "FP32", "shape": [1], "data": [1.0]}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(post, server, "/v2/models/slow/infer", {"inputs": [tensor]})
        gate.wait_until_running()
        for child in children(server):
            os.kill(child, signal.SIGKILL)
        reply = call.result(10)
    gate.open()
    assert reply.status == 503
    assert reply.error == "Stub process 'slow_0' is not healthy. Model instance 'slow_0' was killed by SIGKILL"
