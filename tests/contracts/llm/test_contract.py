"""Which contract a model declares: `headrace_llm.Contract.of`, on models that a server has loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace import Backend, ConfigError, Instance, Model, Server, Tensors
from headrace.registry import PluginInfo
from headrace_llm import Contract, Task

TEXT = 'input { name: "text" data_type: TYPE_STRING dims: [1] optional: true }'
IDS = 'input { name: "input_ids" data_type: TYPE_INT32 dims: [-1] optional: true }'
VECTOR = 'output { name: "vector" data_type: TYPE_FP32 dims: [4] }'
EMBEDDING = 'output { name: "embedding" data_type: TYPE_FP32 dims: [4] }'
TOKENS = 'output { name: "num_input_tokens" data_type: TYPE_UINT32 dims: [1] }'


@dataclass(frozen=True)
class Settings:
    speed: int = 1


class Nothing(Instance):
    def execute(self, inputs: Tensors) -> Tensors:
        raise NotImplementedError


class Anything(Backend):
    """Loads a model with any tensors, which runs none."""

    name = "anything"
    Parameters = Settings

    def load(self, model: Model) -> Nothing:
        return Nothing()


def contract_of(path: Path, *tensors: str, task: str = "embedding", plugins: Sequence[str] = ()) -> Contract | None:
    (path / "m" / "1").mkdir(parents=True)
    named = f'parameters {{ key: "task" value {{ string_value: "{task}" }} }}' if task else ""
    (path / "m" / "config.pbtxt").write_text(f'backend: "anything" {" ".join(tensors)} {named}')
    server = Server(path, plugins=plugins)
    server.plugins.backends.add(Anything, PluginInfo("anything", "tests", "0"))
    with server:
        return Contract.of(server.engine.resolve("m"))


def test_the_one_input_and_the_one_output_of_a_task_may_have_any_name(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, TEXT.replace("text", "sentence"), VECTOR)
    assert contract is not None
    assert contract.task is Task.EMBEDDING
    assert contract.inputs["text"].name == "sentence"
    assert contract.outputs["embedding"].name == "vector"


def test_an_embedding_model_may_take_tokens_and_count_them(tmp_path: Path) -> None:
    contract = contract_of(tmp_path, TEXT, IDS, EMBEDDING, TOKENS)
    assert contract is not None
    assert set(contract.inputs) == {"text", "input_ids"}
    assert set(contract.outputs) == {"embedding", "num_input_tokens"}


@pytest.mark.parametrize(
    ("tensors", "task", "why"),
    [
        ((IDS, TEXT.replace("text", "sentence"), EMBEDDING), "embedding", "embedding, but has no tensor 'text'"),
        ((TEXT, VECTOR, TOKENS), "embedding", "embedding, but has no tensor 'embedding'"),
        ((TEXT, EMBEDDING), "reranking", "reranking, but has no tensor 'query'"),
        ((TEXT, EMBEDDING), "poetry", "parameter 'task' is 'poetry', expected one of generation, embedding"),
        ((TEXT, EMBEDDING), "generation", "generates text, but has no tensor 'text_input'"),
    ],
)
def test_what_a_declared_task_lacks_is_named(tmp_path: Path, tensors: tuple[str, ...], task: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        contract_of(tmp_path, *tensors, task=task)


def test_a_model_that_declares_nothing_has_no_contract(tmp_path: Path) -> None:
    assert contract_of(tmp_path, TEXT, EMBEDDING, task="") is None


def test_a_backend_with_parameters_of_its_own_does_not_complain_of_the_task(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The extension with OpenAI's routes reads it."""
    contract_of(tmp_path, TEXT, EMBEDDING, plugins=("openai",))
    assert "unknown parameter" not in caplog.text
