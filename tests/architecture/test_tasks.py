"""Tasks of core belong to a task group of anyio. Each module that makes tasks by hand stands here, with what ends them.

A task group must be entered and left by one task. So an object that one task starts and another stops makes its task
by hand. The path of a request is on asyncio, because a task group costs more than a request.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "core/src"
#: Core proper, the command line, and the processes of instances.
PACKAGES = ("headrace", "headrace_cli", "headrace_processes")
PATHS = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

#: Calls of asyncio that make a task by hand, or a hidden one: a cancel scope does the work of `wait_for`.
CALLS = {"create_task", "ensure_future", "wait_for"}

#: For each module that makes one task by hand: what awaits or cancels it.
BY_HAND = {
    "headrace_processes/child.py": "Child.start awaits it; if cancelled too, so that no process is lost",
    "headrace_processes/process_executor.py": "ProcessExecutor._end cancels and awaits the restart of a process",
    "headrace_processes/remote_services.py": "ServiceEndpoint.close cancels the calls of a process",
    "headrace_processes/ipc/json_calls.py": "calls of a process end by themselves: half a change of models is none",
    "headrace/models/control.py": "Control.stop cancels the watcher, which Control.start has begun",
    "headrace/models/submission.py": "the path of a request, whose cancellation ends the wait for interceptors",
    "headrace/models/local_services.py": "the path of a request, whose cancellation ends the wait for a load",
    "headrace/models/instance_set.py": "InstanceSet.join awaits the executors that leave",
    "headrace/models/running_loads.py": "Background.settle awaits loads, which go on if their caller is cancelled",
    "headrace/server.py": "Server.stop cancels the drain; a plugin that ignores that costs half a second, not the exit",
}


def made(source: str) -> int:
    """Return how many tasks ``source`` makes by hand."""
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return sum(isinstance(call, ast.Attribute) and call.attr in CALLS for call in calls)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tasks_belong_to_a_group_or_stand_here(path: Path) -> None:
    assert made(path.read_text()) == (str(path.relative_to(ROOT)) in BY_HAND)


def test_every_module_of_the_list_exists() -> None:
    assert [name for name in BY_HAND if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize("call", ["asyncio.ensure_future(x)", "loop.create_task(x)", "await asyncio.wait_for(x, 1)"])
def test_a_task_by_hand_is_found(call: str) -> None:
    assert made(f"async def f(): {call}") == 1
