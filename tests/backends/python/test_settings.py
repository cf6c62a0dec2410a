"""The settings of the Python backend, and Triton's texts for invalid ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.backends.base import Isolation, Model
from headrace.config.model_config_pb2 import ModelConfig, ModelParameter
from headrace.config.parameters import parse_parameters
from headrace.errors import Code, ConfigError
from headrace_python.backend import PythonBackend
from headrace_python.parameters import Parameters


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("shm-default-byte-size", "1048575", "shm-default-byte-size can't be smaller than 1 MiB"),
        ("shm-growth-byte-size", "0", "shm-growth-byte-size can't be smaller than or equal to zero."),
        ("stub-timeout-seconds", "0", "stub-timeout-seconds can't be smaller than or equal to zero."),
        ("load-timeout-seconds", "0", "load-timeout-seconds can't be smaller than or equal to zero."),
        ("thread-pool-size", "0", "thread-pool-size can't be less than 1."),
        ("shm-region-prefix-name", "", "shm-region-prefix-name must at least contain one character."),
        ("shm-region-prefix-name", "a/b", "Invalid shared memory region name: contains invalid characters"),
        ("thread-pool-size", "two", "backend option thread-pool-size of 'python' must be a whole number, got 'two'"),
        ("isolation", "container", "backend option isolation of 'python' is 'container', expected process or thread"),
    ],
)
def test_a_setting_that_breaks_a_rule_is_refused(key: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PythonBackend({key: value})
    assert caught.value.message == text


@pytest.mark.parametrize("value", ["", "-1", "1000001", " 7", "1_000", "+9", "0.5", "٣", "0" * 5000])
def test_how_long_to_stay_awake_has_a_bound(value: str) -> None:
    beginning = "^backend option busy-poll-microseconds of 'python' is '.*', expected"
    with pytest.raises(ConfigError, match=beginning) as caught:
        PythonBackend({"busy-poll-microseconds": value})
    assert caught.value.message.endswith("expected a number of microseconds from 0 to 1000000")
    assert len(caught.value.message) < 1000


def test_settings_that_triton_takes_are_taken() -> None:
    options = {
        "shm-default-byte-size": "1048576",
        "shm-growth-byte-size": "1",
        "stub-timeout-seconds": "7",
        "thread-pool-size": "1",
        "shm-region-prefix-name": "mine_1",
        "default-max-batch-size": "4",
    }
    settings = PythonBackend(options).settings
    assert (settings.stub_timeout_s, settings.isolation) == (7, "process")
    assert PythonBackend({"isolation": "thread"}).settings.isolation == "thread"


def test_settings_for_processes_reach_them(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/model.py").touch()
    isolation = PythonBackend({"load-timeout-seconds": "3600", "busy-poll-microseconds": "300"}).isolation(
        Model("m", 1, tmp_path / "1", ModelConfig(name="m", backend="python"))
    )
    assert isolation is not None
    assert (isolation.start_timeout_s, isolation.load_timeout_s, isolation.busy_poll_us) == (30, 3600, 300)


def test_a_process_does_not_poll_by_default(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1/model.py").touch()
    isolation = PythonBackend({}).isolation(Model("m", 1, tmp_path / "1", ModelConfig(name="m", backend="python")))
    assert isolation is not None
    assert isolation.busy_poll_us == Isolation().busy_poll_us == 0


def parsed(**values: str) -> Parameters:
    return parse_parameters(Parameters, {key: ModelParameter(string_value=value) for key, value in values.items()})


def test_a_models_parameters_are_its_own() -> None:
    parameters = parsed(colour="blue", EXECUTION_ENV_PATH="env.tar.gz", isolation="thread")
    assert parameters.execution_env_path == "env.tar.gz"
    assert parameters.own["colour"] == "blue"


@pytest.mark.parametrize("value", ["yes", "no"])
def test_force_cpu_only_input_tensors_is_yes_or_no(value: str) -> None:
    assert parsed(FORCE_CPU_ONLY_INPUT_TENSORS=value).force_cpu_only_input_tensors == value


def test_force_cpu_only_input_tensors_of_another_value_is_unsupported() -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(FORCE_CPU_ONLY_INPUT_TENSORS="maybe")
    assert caught.value.message == "Incorrect value for FORCE_CPU_ONLY_INPUT_TENSORS: maybe'"
    assert caught.value.code is Code.UNSUPPORTED
