"""Servers in this process, whose models have processes of their own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from headrace.executors.executor import Executor
from headrace.messages.response import Answer, InferResponse
from headrace.messages.ticket import Ticket
from headrace.registry import PluginInfo
from headrace.server import Server
from tests.core.conftest import make_ticket

if TYPE_CHECKING:
    from tests.core.conftest import WriteModel

sys.path.insert(0, str(Path(__file__).parent))

#: Found by its name, as a child finds it.
Trial = import_module("trial_backend").Trial

CONFIG = """
backend: "trial" max_batch_size: 8 instance_group {{ kind: KIND_CPU count: {instances} }}
input {{ name: "x" data_type: TYPE_FP32 dims: [-1] }}
output {{ name: "y" data_type: TYPE_FP32 dims: [-1] }} output {{ name: "n" data_type: TYPE_INT64 dims: [1] }}
"""


def trial_config(instances: int = 1, config: str = "", **parameters: Any) -> str:
    """The config of a trial model with those parameters of its own."""
    written = (
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )
    return CONFIG.format(instances=instances) + config + "".join(written)


class Running:
    """The model ``m`` of a server."""

    def __init__(self, server: Server, folder: Path, stop: Callable[[], None]) -> None:
        self.server, self.folder, self._stop = server, folder, stop

    @property
    def reason(self) -> str:
        """Return the reason of the model in the index."""
        (entry,) = self.server.index()
        return entry.reason

    @property
    def executors(self) -> list[Executor]:
        return list(self.server.served("m")[0].executors)

    @property
    def executor(self) -> Executor:
        return self.executors[0]

    def infer(self, deed: str = "", x: Any = ((1.0, 2.0),), **settings: Any) -> InferResponse:
        parameters = {"do": deed} if deed else {}
        return self.server.infer("m", {"x": np.asarray(x, np.float32)}, parameters=parameters, **settings)

    def number(self, deed: str) -> int:
        """Return the number that the model returns for ``deed``."""
        return int(np.asarray(self.infer(deed).outputs["n"])[0, 0])

    def submit(self, respond: Callable[[Answer, bool], None], **parameters: Any) -> Ticket:
        """A request whose answers go to ``respond``, on the event loop."""
        ticket = make_ticket("m", {"x": np.ones((1, 2), np.float32)}, respond, parameters=parameters)
        self.on_loop(self.server.submit, ticket)
        return ticket

    def stop(self) -> None:
        """End the server now."""
        self._stop()

    def on_loop(self, call: Callable[..., Any], *arguments: Any) -> Any:
        async def run() -> Any:
            return call(*arguments)

        return asyncio.run_coroutine_threadsafe(run(), self.server.loop).result(30)


@pytest.fixture
def run_trial(repository: Path, tmp_path: Path, write_model: WriteModel) -> Iterator[Callable[..., Running]]:
    """Serves one trial model: ``run_trial(instances=2, config=..., **its parameters)``."""
    with ExitStack() as stack:

        def run(instances: int = 1, config: str = "", options: Any = None, **parameters: Any) -> Running:
            parameters.setdefault("folder", str(tmp_path))
            write_model("m", trial_config(instances, config, **parameters))
            server = Server(repository, **{"exit_on_error": False, **(options or {})})
            server.plugins.backends.add(Trial, PluginInfo("trial", "tests", "0"))
            return Running(stack.enter_context(server), tmp_path, stack.close)

        yield run


@pytest.fixture
def write_callee(write_model: WriteModel, tmp_path: Path) -> Callable[[str], None]:
    """Writes the model ``callee``, which does one deed for every request, in a thread of the server."""

    def write(always: str) -> None:
        write_model("callee", trial_config(isolation="thread", always=always, folder=str(tmp_path)))

    return write
