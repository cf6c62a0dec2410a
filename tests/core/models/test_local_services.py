"""The services of a server for the instances of its models, called from their own threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from headrace.backends.base import Backend, Instance, Model, Tensors
from headrace.backends.services import LogLevel, Services
from headrace.errors import HeadraceError, NotFound
from headrace.registry import PluginInfo
from headrace.server import Server
from headrace.telemetry.logs import LineFormatter
from headrace_http import text_format

CONFIG = """
backend: "served" input { name: "x" data_type: TYPE_FP32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [1] }
instance_group { kind: KIND_CPU count: 2 }
"""


class Served(Instance):
    """Calls its services as the test sets it up, when it is loaded and when it executes."""

    def __init__(self, model: Model) -> None:
        assert model.services is not None
        self.services = model.services
        ServedBackend.on_load(self.services, model)

    def execute(self, inputs: Tensors) -> Tensors:
        ServedBackend.on_execute(self.services)
        return {"y": inputs["x"]}


def nothing(*arguments: object) -> None:
    """The default of a test's instance: it does not use its services."""


class ServedBackend(Backend):
    name: ClassVar[str] = "served"
    on_load: ClassVar[Callable[[Services, Model], object]]
    on_execute: ClassVar[Callable[[Services], object]]

    def load(self, model: Model) -> Served:
        return Served(model)


@pytest.fixture
def run(write_model: Any, make_server: Callable[..., Server]) -> Callable[..., None]:
    """Runs a scenario on a server with the model ``m`` and, beside it, the identity ``other``."""

    def run(
        scenario: Callable[[Server], Coroutine[Any, Any, None]],
        on_load: Callable[[Services, Model], object] = nothing,
        on_execute: Callable[[Services], object] = nothing,
        **options: Any,
    ) -> None:
        write_model("m", CONFIG)
        write_model("other")
        ServedBackend.on_load, ServedBackend.on_execute = staticmethod(on_load), staticmethod(on_execute)

        async def serve() -> None:
            server = make_server(**options)
            server.plugins.backends.add(ServedBackend, PluginInfo("served", "tests", "0"))
            async with server:
                await scenario(server)

        asyncio.run(asyncio.wait_for(serve(), 60))

    return run


async def execute(server: Server) -> None:
    await server.infer_async("m", {"x": np.zeros(1, np.float32)})


EXPLICIT: Mapping[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}


def test_the_metrics_of_a_version_are_there_from_its_load_to_the_close_of_its_last_instance(
    run: Callable[..., None],
) -> None:
    def count(services: Services, model: Model) -> None:
        loads = services.metric(services.metric_family("loads", "of instances", "counter"), {"model": model.name}, None)
        services.update_metric(loads, "increment", 1)

    async def scenario(server: Server) -> None:
        def page() -> str:
            return text_format.text(server.custom_metrics.collect())

        assert page() == '# HELP loads of instances\n# TYPE loads counter\nloads{model="m"} 2\n'
        await server.unload("m")
        while page():
            await asyncio.sleep(0.01)
        await server.load("m", {})
        assert 'loads{model="m"} 2\n' in page()

    run(scenario, count, **EXPLICIT)


def test_the_instances_of_a_version_load_side_by_side(run: Callable[..., None]) -> None:
    """Each on the thread that will run it, even if versions take turns."""
    both, results = threading.Barrier(2), []

    def wait_for_both(services: Services, model: Model) -> None:
        both.wait(20)
        results.append((threading.current_thread().name, model.instance_name))

    async def scenario(server: Server) -> None:
        assert sorted(results) == [("headrace-m_0_0", "m_0_0"), ("headrace-m_0_1", "m_0_1")]

    run(scenario, wait_for_both, model_load_thread_count=1)


def test_the_reason_of_a_failed_load_is_that_of_the_first_instance(run: Callable[..., None], write_model: Any) -> None:
    def fail(services: Services, model: Model) -> None:
        raise ValueError(f"{model.instance_name} is broken")

    async def scenario(server: Server) -> None:
        write_model("m", CONFIG.replace("count: 2", "count: 32"))
        with pytest.raises(HeadraceError, match="failed to load 'm': ValueError: m_0_0 is broken"):
            await server.load("m", {})

    run(scenario, fail, **{**EXPLICIT, "load_model": ()})


def test_the_metrics_of_an_instance_that_fails_to_load_are_removed(run: Callable[..., None]) -> None:
    def fail(services: Services, model: Model) -> None:
        services.metric(services.metric_family("loads", "", "counter"), {}, None)
        raise ValueError("no")

    async def scenario(server: Server) -> None:
        assert text_format.text(server.custom_metrics.collect()) == ""

    run(scenario, fail, exit_on_error=False)


def test_a_model_loads_unloads_and_checks_others(run: Callable[..., None]) -> None:
    results: list[object] = []

    def work(services: Services) -> None:
        results.extend(services.is_model_ready("other", version) for version in ("", "1", "2"))
        services.unload_model("other", False)
        results.append(services.is_model_ready("other", ""))
        services.load_model("other", '{"name": "other", "backend": "identity", "max_batch_size": 3}', {})
        results.append(services.is_model_ready("other", ""))
        for call in (lambda: services.load_model("nobody", "", {}), lambda: services.is_model_ready("other", "x")):
            with pytest.raises(HeadraceError) as caught:
                call()
            results.append(caught.value.message.partition(",")[0])

    async def scenario(server: Server) -> None:
        await execute(server)
        version = "failed to get model version from specified version string 'x' (details: not an integer)"
        assert results == [True, True, False, False, True, "failed to load 'nobody'", version]
        assert server.resolve("other").max_batch_size == 3

    run(scenario, on_execute=work, **EXPLICIT)


def test_a_model_may_load_another_while_it_is_loaded(run: Callable[..., None]) -> None:
    async def scenario(server: Server) -> None:
        with pytest.raises(NotFound):
            server.resolve("other")
        await server.load("m", {})
        assert await server.is_model_ready("other")

    run(
        scenario,
        lambda services, model: services.load_model("other", "", {}),
        **{**EXPLICIT, "load_model": ()},
    )


def test_models_that_load_others_while_they_are_loaded_need_no_more_than_one_loading_thread(
    run: Callable[..., None], write_model: Any
) -> None:
    """Both instances of both models wait for the next model, and all of them share one place."""
    write_model("n", CONFIG)
    following = {"m": "n", "n": "other"}

    async def scenario(server: Server) -> None:
        await server.load("m", {})
        assert await server.is_model_ready("other")

    run(
        scenario,
        lambda services, model: services.load_model(following[model.name], "", {}),
        **{**EXPLICIT, "load_model": (), "model_load_thread_count": 1},
    )


def test_a_model_that_is_being_loaded_may_unload_one_whose_load_waits_for_a_thread(run: Callable[..., None]) -> None:
    may_unload = threading.Event()

    def work(services: Services, model: Model) -> None:
        assert may_unload.wait(20)
        services.unload_model("other", False)

    async def scenario(server: Server) -> None:
        first = asyncio.ensure_future(server.load("m", {}))
        while not any(thread.name.startswith("headrace-m") for thread in threading.enumerate()):
            await asyncio.sleep(0.01)
        second = asyncio.ensure_future(server.load("other", {}))
        await asyncio.sleep(0.1)  # it cannot be seen to wait for a thread; if it does not yet, nothing is at stake
        may_unload.set()
        await asyncio.gather(first, second)
        assert await server.is_model_ready("m")

    run(scenario, work, **{**EXPLICIT, "load_model": (), "model_load_thread_count": 1})


@pytest.mark.parametrize("change", ["load_model", "unload_model"])
def test_a_model_that_is_being_loaded_cannot_wait_for_itself(run: Callable[..., None], change: str) -> None:
    def work(services: Services, model: Model) -> None:
        if change == "load_model":
            services.load_model("m", "", {})
        else:
            services.unload_model("m", False)

    async def scenario(server: Server) -> None:
        with pytest.raises(HeadraceError, match="model 'm' is being loaded, and would wait for itself: 'm' -> 'm'"):
            await server.load("m", {})

    run(scenario, work, **{**EXPLICIT, "load_model": ()})


def test_models_that_load_each_other_are_refused_with_the_path(run: Callable[..., None], write_model: Any) -> None:
    write_model("n", CONFIG)

    def work(services: Services, model: Model) -> None:
        services.load_model("n" if model.name == "m" else "m", "", {})

    async def scenario(server: Server) -> None:
        with pytest.raises(HeadraceError, match=r"model 'n' is being loaded, .* itself: 'n' -> 'm' -> 'n'"):
            await server.load("m", {})

    run(scenario, work, **{**EXPLICIT, "load_model": ()})


@pytest.mark.parametrize(
    ("level", "number"),
    [("info", logging.INFO), ("warning", logging.WARNING), ("error", logging.ERROR), ("verbose", logging.DEBUG)],
)
def test_a_line_of_a_models_log_has_its_source_on_the_same_line(
    run: Callable[..., None], caplog: pytest.LogCaptureFixture, level: LogLevel, number: int
) -> None:
    caplog.set_level(logging.DEBUG, "headrace")

    def work(services: Services) -> None:
        services.log(level, "hello\nworld \x1b[31m 100%", "/models/m/1/model.py", 91)

    async def scenario(server: Server) -> None:
        await execute(server)

    run(scenario, on_execute=work)
    (record,) = (record for record in caplog.records if record.name == "headrace.python")
    assert record.levelno == number
    shown = LineFormatter("default").format(record)
    assert shown.endswith(' model.py:91] "hello\\nworld \\u001b[31m 100%"')  # as a real Triton shows it
