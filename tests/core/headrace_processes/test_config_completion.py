"""A config is completed in a process of its own, which may crash."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from headrace.backends.base import Backend, Isolation, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace.config.options import ServerOptions
from headrace.errors import Code, ConfigError, HeadraceError, LoadError
from headrace.models.configuring import fill
from headrace.plugins import Plugins
from headrace_processes.config_completion import complete_in_process

sys.path.insert(0, str(Path(__file__).parent))

Completing: type[Backend] = import_module("completing_backend").Completing


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))


@dataclass
class Completion:
    """The completed config of the model ``m``."""

    config: ModelConfig
    error: HeadraceError | None


def ask(deed: str = "", **bounds: Any) -> Completion:
    config = ModelConfig(name="m", backend="completing")
    try:
        complete_in_process(Completing({"do": deed}), Model("m", 1, Path("/m/1"), config), Isolation(**bounds))
    except HeadraceError as error:
        return Completion(config, error)
    return Completion(config, None)


def test_only_completable_fields_are_taken_from_the_other_process() -> None:
    """The other process has opened a file that may have taken control of it."""
    completion = ask()
    assert completion.error is None
    (output,) = completion.config.output
    assert (completion.config.max_batch_size, int(output.name) != os.getpid()) == (3, True)
    assert (completion.config.backend, dict(completion.config.parameters)) == ("completing", {})


def test_errors_arrive_as_they_were_raised() -> None:
    config, load, stranger = (ask(deed).error for deed in ("config", "load", "stranger"))
    assert isinstance(config, ConfigError)
    assert (config.message, config.code, config.field) == ("no such dims", Code.UNSUPPORTED, "input[0].dims")
    assert isinstance(load, LoadError)
    assert (load.message, load.code) == ("no such file", Code.NOT_FOUND)
    assert stranger is not None
    assert stranger.message == "backend 'completing' failed to complete the config of 'm': SystemExit: enough"


@pytest.mark.parametrize(
    ("deed", "bounds", "reason"),
    [
        ("crash", {}, "was killed by SIGSEGV\nFatal Python error: Segmentation fault"),
        ("exit", {}, "exited with status 3"),
        ("hang", {"start_timeout_s": 1.0, "load_timeout_s": 1.0}, "was not over within 2 s"),
    ],
)
def test_a_process_that_exits_early_or_never_is_reported_with_its_model(
    deed: str, bounds: dict[str, float], reason: str
) -> None:
    completion = ask(deed, **bounds)
    assert isinstance(completion.error, LoadError)
    lead = "the process in which the config of model 'm' was being completed "
    assert completion.error.message.startswith(lead + reason)
    assert completion.config == ModelConfig(name="m", backend="completing")


def test_memory_is_bounded() -> None:
    error = ask("fill", memory_bytes=2 << 30).error
    assert error is not None
    assert "MemoryError" in error.message


@pytest.mark.parametrize(("isolation", "is_here"), [("process", False), ("thread", True), ("", True)])
def test_a_model_in_a_process_has_its_config_completed_in_one(isolation: str, is_here: bool) -> None:
    config = ModelConfig(name="m", backend="completing")
    if isolation:
        config.parameters["isolation"].string_value = isolation
    fill(Model("m", 1, Path("/m/1"), config), Completing({}), ServerOptions(), Plugins.discover(()).executors)
    (output,) = config.output
    assert (int(output.name) == os.getpid()) is is_here
