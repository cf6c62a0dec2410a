"""A repository whose Python models run in the server and report to the test."""

from __future__ import annotations

import asyncio
import builtins
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import HeadraceError, Server, ServerOptions
from headrace_on_demand import OnDemand, OnDemandOptions

MIB = 1 << 20
#: The size of each model's files, which are sparse.
SIZE = 64 * MIB
_MODEL = """
import builtins
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_name"]
        builtins.on_demand_probe.load(self.name)

    def execute(self, requests):
        return [builtins.on_demand_probe.execute(self.name, request, pb_utils) for request in requests]

    def finalize(self):
        builtins.on_demand_probe.unload(self.name)
"""
_CONFIG = """backend: "python" max_batch_size: 0
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
parameters { key: "isolation" value { string_value: "thread" } }
"""


async def until(holds: Callable[[], object]) -> None:
    """Wait until ``holds`` returns something true."""
    while not holds():
        await asyncio.sleep(0.005)


async def refusal(call: Awaitable[object]) -> HeadraceError:
    with pytest.raises(HeadraceError) as caught:
        await call
    return caught.value


class Probe:
    """Controls and records the models of the test. Called on their threads."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()
        self.loaded: set[str] = set()
        self.double: list[str] = []
        self.unloads: list[str] = []
        #: Models that fail to load, with the reason.
        self.broken: dict[str, str] = {}
        #: The events that loads and executions of models wait for.
        self.loading: dict[str, threading.Event] = {}
        self.executing: dict[str, threading.Event] = {}
        #: The model that each calling model calls.
        self.calls: dict[str, str] = {}

    def load(self, name: str) -> None:
        self.loads[name] += 1
        if name in self.loaded:
            self.double.append(name)
        if name in self.loading:
            assert self.loading[name].wait(20)
        if name in self.broken:
            raise RuntimeError(self.broken[name])
        self.loaded.add(name)

    def unload(self, name: str) -> None:
        self.loaded.discard(name)
        self.unloads.append(name)

    def execute(self, name: str, request: Any, pb_utils: Any) -> Any:
        if name in self.executing:
            assert self.executing[name].wait(20)
        value = pb_utils.get_input_tensor_by_name(request, "x")
        if name in self.calls:
            answer = pb_utils.InferenceRequest(
                model_name=self.calls[name], inputs=[value], requested_output_names=["y"]
            ).exec()
            if answer.has_error():
                return pb_utils.InferenceResponse(error=answer.error())
            value = pb_utils.get_output_tensor_by_name(answer, "y")
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", value.as_numpy() + 1)])


class Repository:
    """Models of the test, and the server that serves them in mode on-demand."""

    def __init__(self, folder: Path, probe: Probe) -> None:
        self.folder, self.probe = folder, probe
        self.server: Server
        self.mode: OnDemand

    def add(self, *names: str, config: str = "", size: int = SIZE) -> None:
        for name in names:
            version = self.folder / name / "1"
            version.mkdir(parents=True)
            (version / "model.py").write_text(_MODEL)
            (version.parent / "config.pbtxt").write_text(_CONFIG + config)
            with (version / "weights").open("wb") as weights:
                weights.truncate(size)

    def add_ensemble(self, name: str, *steps: str) -> None:
        """Add an ensemble that calls ``steps`` one after the other."""
        (self.folder / name / "1").mkdir(parents=True)
        tensors = ["x", *(f"t{number}" for number in range(1, len(steps))), "y"]
        text = ", ".join(
            f'{{ model_name: "{step}" model_version: -1 input_map {{ key: "x" value: "{tensors[at]}" }} '
            f'output_map {{ key: "y" value: "{tensors[at + 1]}" }} }}'
            for at, step in enumerate(steps)
        )
        (self.folder / name / "config.pbtxt").write_text(
            f"""platform: "ensemble" input {{ name: "x" data_type: TYPE_FP32 dims: 1 }}
            output {{ name: "y" data_type: TYPE_FP32 dims: 1 }} ensemble_scheduling {{ step: [ {text} ] }}"""
        )

    def run(self, scenario: Callable[[], Awaitable[None]], *, ports: bool = False, **settings: Any) -> None:
        """Run ``scenario`` with a server that has the on-demand options ``settings``."""
        addresses: Any = {f"{name}_address": "127.0.0.1" for name in ("http", "grpc", "metrics")}
        numbers: Any = {f"{name}_port": 0 for name in ("http", "grpc", "metrics")}
        options = ServerOptions(
            model_repository=(str(self.folder),),
            model_control_mode="on-demand",
            exit_timeout_secs=10,
            plugin_options=(OnDemandOptions(**settings),),
            **addresses,
            **numbers,
        )

        async def main() -> None:
            self.server = Server(options)
            assert isinstance(self.server.engine.mode, OnDemand)
            self.mode = self.server.engine.mode
            async with self.server:
                if ports:
                    await self.server.start_frontends()
                await scenario()
                assert {each.name: each.in_flight for each in self.mode.loads.states.values() if each.in_flight} == {}
                assert {each.name for each in self.mode.loads.states.values() if each.waiting} == set()

        asyncio.run(asyncio.wait_for(main(), 50))
        assert self.probe.double == []

    def port(self, protocol: str) -> int:
        (found,) = [each for each in self.server.frontends if (each.protocol or each.name) == protocol]
        return int(found.port)  # type: ignore[attr-defined]

    async def infer(self, name: str, value: float = 1) -> float:
        answer = await self.server.infer_async(name, {"x": np.array([value], np.float32)})
        return float(np.asarray(answer.outputs["y"])[0])

    @property
    def resident(self) -> set[str]:
        return set(self.mode.models.all_served())


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Probe:
    made = Probe()
    monkeypatch.setattr(builtins, "on_demand_probe", made, raising=False)  # models import modules of their own
    return made


@pytest.fixture
def repository(tmp_path: Path, probe: Probe) -> Iterator[Repository]:
    yield Repository(tmp_path / "models", probe)
    for gate in (*probe.loading.values(), *probe.executing.values()):
        gate.set()
