"""The kind of executor is a part of a plugin: it is chosen by its name, and its absence is explained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import ConfigError, Executor, InstancePlan, Isolation, Model, Server, ServerOptions, plugins
from headrace.backends.identity import Identity
from headrace.config.model_config_pb2 import ModelConfig
from headrace.executors.thread_kind import ThreadExecutors
from headrace.models.configuring import fill, find_executor
from headrace.plugins import Plugins
from headrace.registry import PluginInfo

CONFIG = """
backend: "identity" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""
WHERE = 'parameters { key: "isolation" value { string_value: "%s" } }'


class Elsewhere(ThreadExecutors):
    """A thread, under another name."""

    name = "elsewhere"
    made: list[str]

    def create(self, plan: InstancePlan) -> Any:
        self.made.append(plan.model.instance_name)
        return super().create(plan)


@pytest.fixture
def models(tmp_path: Path) -> Callable[[str, str], Path]:
    def write(name: str, config: str) -> Path:
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "config.pbtxt").write_text(config)
        return tmp_path

    return write


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [(info, entry) for info, entry in plugins._installed() if info.name != "processes"]
    monkeypatch.setattr(plugins, "_installed", lambda: others)


def reason(repository: Path, name: str) -> str:
    with Server(repository, exit_on_error=False, plugins=()) as server:
        (entry,) = [entry for entry in server.index() if entry.name == name]
        return entry.reason


def test_a_model_runs_where_the_plugin_that_it_names_has_its_instances(models: Callable[[str, str], Path]) -> None:
    repository = models("m", CONFIG + WHERE % "elsewhere" + "instance_group { count: 2 kind: KIND_CPU }")
    models("other", CONFIG)
    Elsewhere.made = []
    server = Server(repository)
    server.plugins.executors.add(Elsewhere, PluginInfo("rooms", "headrace-rooms", "1.0"))
    with server:
        assert server.infer("m", {"x": np.ones((1, 1), np.float32)}).outputs["y"].tolist() == [[1]]  # type: ignore[union-attr]
        executors: list[Executor] = [each for model in server.served() for each in model.executors]
        assert len(executors) == 3
    assert Elsewhere.made == ["m_0_0", "m_0_1"]


def test_a_kind_that_is_not_installed_is_named_with_those_that_are(models: Callable[[str, str], Path]) -> None:
    assert reason(models("m", CONFIG + WHERE % "proces"), "m") == (
        "Invalid argument: model 'm': parameter 'isolation' is 'proces': no plugin provides executor 'proces'; did you "
        "mean 'process'? installed: process, thread"
    )


def test_a_model_with_a_process_fails_without_the_plugin(
    models: Callable[[str, str], Path], without_processes: None
) -> None:
    repository = models("m", CONFIG + WHERE % "process")
    models("other", CONFIG)
    assert "'process': no plugin provides executor 'process'; installed: thread" in reason(repository, "m")
    assert reason(repository, "other") == ""


def test_a_backend_with_processes_is_refused_without_the_plugin(
    models: Callable[[str, str], Path], without_processes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Identity, "isolation", lambda self, model: Isolation())
    assert "model 'm' needs executor 'process': no plugin provides executor 'process'; installed: thread" in reason(
        models("m", CONFIG), "m"
    )


def test_an_unknown_kind_completes_no_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the process would open the file with the engine that the author isolates."""
    completed: list[str] = []
    monkeypatch.setattr(Identity, "complete_config", lambda self, model: completed.append(model.name))
    config, executors = ModelConfig(name="m", backend="identity"), Plugins.discover(()).executors
    model = Model("m", 1, Path("/m/1"), config)
    fill(model, Identity({}), ServerOptions(), executors)
    assert completed.pop() == "m"
    config.parameters["isolation"].string_value = "prison"
    with pytest.raises(ConfigError, match="parameter 'isolation' is 'prison': no plugin provides executor 'prison'"):
        fill(model, Identity({}), ServerOptions(), executors)
    assert completed == []


def test_two_plugins_with_one_kind_are_both_named() -> None:
    plugins = Plugins.discover(())
    again = type("Again", (Elsewhere,), {"name": "process"})
    plugins.executors.add(again, PluginInfo("rooms", "headrace-rooms", "1.0"))
    with pytest.raises(ConfigError, match=r"executor 'process' is registered by both .* of headrace .* and 'rooms'"):
        find_executor("process", ModelConfig(name="m"), plugins.executors)
