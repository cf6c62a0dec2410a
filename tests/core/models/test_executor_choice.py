"""Which instances get processes of their own, and what those may take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import AnyInstance, Backend, Isolation, Model
from headrace.config import parameters
from headrace.config.model_config_pb2 import ModelConfig
from headrace.errors import ConfigError
from headrace.models.configuring import check_executor
from headrace.models.executor_choice import choose_executor
from headrace.plugins import Plugins

OWN = Isolation(python="/usr/bin/python-of-the-model", environ={"A": "b"}, busy_poll_us=300)


class Threaded(Backend):
    name = "threaded"

    def load(self, model: Model) -> AnyInstance:
        raise NotImplementedError


class Apart(Threaded):
    name = "apart"

    def isolation(self, model: Model) -> Isolation | None:
        return OWN


EXECUTORS = Plugins.discover(()).executors


def chosen(backend: type[Backend], **parameters: Any) -> Isolation | None:
    config = ModelConfig(name="m")
    for key, value in parameters.items():
        config.parameters[key].string_value = str(value)
    return choose_executor(backend({}), Model("m", 1, Path(), config), EXECUTORS).isolation


def test_the_backend_chooses_unless_the_model_does() -> None:
    assert chosen(Threaded) is None
    assert chosen(Apart) == OWN
    assert chosen(Apart, isolation="process") == OWN
    assert chosen(Apart, isolation="thread") is None
    assert chosen(Threaded, isolation="process") == Isolation()


@pytest.mark.parametrize("value", ["", "Process", "threads", "process ", "x" * 10_000])
def test_any_other_isolation_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^model 'm': parameter 'isolation' is '") as caught:
        chosen(Apart, isolation=value)
    assert caught.value.message.endswith("installed: process, thread")
    assert caught.value.field == "parameters['isolation']"
    assert len(caught.value.message) < 1000


def test_a_limit_of_memory_is_added_to_what_the_backend_chooses() -> None:
    isolation = chosen(Apart, memory_limit_bytes=1 << 30)
    assert isolation is not None
    assert (isolation.memory_bytes, isolation.python, isolation.environ) == (1 << 30, OWN.python, OWN.environ)


@pytest.mark.parametrize("value", ["", "0", "-1", "1.5", "1e9", "1 GiB", "٣", "9" * 19, "9" * 10_000, "0" * 10_000])
def test_a_limit_that_is_no_number_of_bytes_is_refused(value: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^parameter 'memory_limit_bytes' is '.*', expected a number of bytes above 0$"
    ):
        chosen(Apart, memory_limit_bytes=value)


@pytest.mark.parametrize("parameters", [{}, {"isolation": "thread"}])
def test_a_limit_without_a_process_is_refused(parameters: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="'memory_limit_bytes' needs instances in processes of their own"):
        chosen(Threaded, memory_limit_bytes=1 << 30, **parameters)


def test_how_long_a_process_stays_awake_does_not_matter_where_there_is_none() -> None:
    assert chosen(Threaded, busy_poll_microseconds=300) is None
    assert chosen(Threaded, restart_pause_seconds=60) is None
    with pytest.raises(
        ConfigError, match="'restart_pause_seconds' is '0', expected a number of seconds from 1 to 86400"
    ):
        chosen(Threaded, restart_pause_seconds=0)
    with pytest.raises(ConfigError, match="'busy_poll_microseconds' is 'long'"):
        chosen(Threaded, busy_poll_microseconds="long")


@pytest.mark.parametrize("value", [0, 1, 1_000_000])
def test_how_long_to_stay_awake_is_the_backends_unless_the_model_says(value: int) -> None:
    isolations = [chosen(Apart), chosen(Apart, busy_poll_microseconds=value)]
    assert [isolation and isolation.busy_poll_us for isolation in isolations] == [OWN.busy_poll_us, value]
    paused = [chosen(Apart), chosen(Apart, restart_pause_seconds=60)]
    assert [isolation and isolation.restart_pause_s for isolation in paused] == [15, 60]


@pytest.mark.parametrize("value", ["", "-1", "1000001", "0.5", "300us", "off", "0" * 20, "0" * 5000])
def test_how_long_to_stay_awake_has_a_bound(value: str) -> None:
    wanted = r"^parameter 'busy_poll_microseconds' is '.*', expected a number of microseconds from 0 to 1000000$"
    with pytest.raises(ConfigError, match=wanted):
        chosen(Apart, busy_poll_microseconds=value)


@pytest.mark.parametrize("value", ["on", "off", "auto"])
def test_the_event_loop_runs_instances_of_models_with_the_parameter(value: str) -> None:
    config = ModelConfig()
    assert parameters.read_event_loop(config.parameters) == "auto"
    config.parameters["event_loop"].string_value = value
    assert parameters.read_event_loop(config.parameters) == value
    assert parameters.unknown(Apart.Parameters, config.parameters) == []


@pytest.mark.parametrize("value", ["", "On", "true", "1", "x" * 10_000])
def test_any_other_event_loop_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"^parameter 'event_loop' is '.*', expected 'on', 'off' or 'auto'$"):
        chosen(Apart, event_loop=value)


def test_an_instance_in_a_process_is_none_of_the_event_loops() -> None:
    with pytest.raises(ConfigError, match="run in processes of their own"):
        chosen(Apart, event_loop="on")
    assert chosen(Apart, event_loop="off") == OWN
    assert chosen(Apart, event_loop="on", isolation="thread") is None


def test_all_mistakes_are_found_at_once() -> None:
    config = ModelConfig()
    keys = ("isolation", "memory_limit_bytes", "busy_poll_microseconds", "event_loop")
    for key in keys:
        config.parameters[key].string_value = "much"
    problems = [*check_executor(config, EXECUTORS), *parameters.check(Threaded.Parameters, config.parameters)]
    assert [problem.field for problem in problems] == [f"parameters['{key}']" for key in keys]
