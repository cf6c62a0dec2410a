"""LoRA adapters, per request. The oracle is arithmetic: the weights of the model, plus scale times B times A."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from headrace import InvalidArgument, LoadError
from tests.backends.transformers import tiny_models
from tests.backends.transformers.conftest import Given, Loop
from tests.backends.transformers.test_bad_files import edit, load

RANK, ALPHA = 4, 12
PROMPT = "The quick brown fox"
SAMPLING = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}
#: The adapters: the modules that each changes.
ADAPTERS = {"loud": ("q_proj", "v_proj"), "calm": ("down_proj",)}
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def write_adapter(model: Any, folder: Path, *ends: str, **config: Any) -> Pairs:
    """Write an adapter of random numbers. Return A f32[rank, inputs] and B f32[outputs, rank] by the module's name."""
    torch.manual_seed(len(ends))
    pairs = {
        name: (torch.randn(RANK, module.in_features), torch.randn(module.out_features, RANK) / 4)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in ends
    }
    folder.mkdir(parents=True)
    tensors = {
        f"base_model.model.{name}.lora_{letter}.weight": each
        for name, pair in pairs.items()
        for letter, each in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(ends), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**about, "auto_mapping": None, **config}))
    return pairs


def add_adapters(folder: Path) -> Path:
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_models.llama(folder))
    for name, ends in ADAPTERS.items():
        write_adapter(model, folder / "adapters" / name, *ends)
    return folder


def merged(folder: Path, name: str, scratch: Path) -> Any:
    """Return the model in ``folder`` whose weights have the adapter ``name`` in them, none if it is empty."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    pairs = write_adapter(model, scratch / "adapter", *ADAPTERS[name]) if name else {}
    with torch.no_grad():
        for module, (a, b) in pairs.items():
            model.get_submodule(module).weight += ALPHA / RANK * b @ a
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    return write_model(tmp_path_factory.mktemp("adapters"), "chat", add_adapters)


@pytest.fixture(scope="module")
def loop(start_server: Callable[..., Loop], folder: Path) -> Loop:
    return start_server(folder.parents[1])


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """The tokens without an adapter, and with each."""
    made = {}
    for name in ("", *ADAPTERS):
        model = merged(folder, name, tmp_path_factory.mktemp("again") / name)
        ids = transformers.AutoTokenizer.from_pretrained(folder)(PROMPT, return_tensors="pt").input_ids
        options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": -1}
        made[name] = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()
    assert len(set(map(tuple, made.values()))) == 3
    return made


def test_each_request_has_its_adapter_whatever_runs_beside_it(loop: Loop, expected: dict[str, list[int]]) -> None:
    async def ask() -> list[tuple[str, Given]]:
        names = [*expected] * 4
        asked = [loop.ask("chat", PROMPT, sampling={**SAMPLING, "lora_name": name}) for name in names]
        return list(zip(names, await asyncio.gather(*asked), strict=True))

    for name, given in loop.run(ask()):
        assert given.ids == expected[name], name


def test_a_sampled_text_with_an_adapter_depends_on_its_seed_alone(loop: Loop) -> None:
    sampling = {"temperature": 1, "seed": 3, "max_tokens": 12, "lora_name": "loud", "repetition_penalty": 1.3}
    first, second = (loop.run(loop.ask("chat", PROMPT, sampling=sampling)) for _ in range(2))
    assert first.ids == second.ids


def test_an_unknown_adapter_is_refused_with_the_known_ones(loop: Loop) -> None:
    with pytest.raises(InvalidArgument, match=r"lora_name is 'shy', expected one of calm, loud"):
        loop.run(loop.ask("chat", PROMPT, sampling={"lora_name": "shy"}))


CONFIG, WEIGHTS = "adapters/loud/adapter_config.json", "adapters/loud/adapter_model.safetensors"


def drop_a_tensor(folder: Path) -> None:
    tensors = {f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight": torch.zeros(4, 4)
               for letter in "A"}  # fmt: skip
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: (folder / CONFIG).unlink(), "adapters/loud has no adapter_config.json"),
        (lambda folder: (folder / CONFIG).write_text("[" * 99999), "adapter_config.json is not JSON"),
        (lambda folder: (folder / CONFIG).write_text("[]"), "is not the config of an adapter"),
        (lambda folder: (folder / WEIGHTS).unlink(), "adapters/loud has no adapter_model.safetensors"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"\xff" * 64), "is not a complete safetensors file"),
        (edit(CONFIG, peft_type="PREFIX_TUNING"), "peft_type is 'PREFIX_TUNING', expected LORA"),
        (edit(CONFIG, init_lora_weights="pissa"), "init_lora_weights is 'pissa', which changes the weights"),
        (edit(CONFIG, megatron_config={"a": 1}), "'megatron_config' is not supported"),
        (edit(CONFIG, r=10**9), "the rank 1000000000 does not fit the tensors"),
        (edit(CONFIG, r="4"), "the rank 4 does not fit|unable to load the adapter"),
        (edit(CONFIG, r=8), "unable to load the adapter in .*loud"),
        (edit(CONFIG, target_modules=["q_proj"]), "'.*v_proj.*' of the adapter has no place in LlamaForCausalLM"),
        (edit(CONFIG, target_modules=["q_proj", "v_proj", "o_proj"]), "the adapter has no tensor for '.*o_proj.*'"),
        (edit(CONFIG, target_modules=["nothing"]), "unable to load the adapter in .*loud"),
        (edit(CONFIG, target_modules=7), "unable to load the adapter in .*loud"),
        (drop_a_tensor, "unable to load the adapter in .*loud|the adapter has no tensor"),
    ],
    ids=range(16),
)  # fmt: skip
def test_a_damaged_adapter_is_refused_by_name(
    folder: Path, tmp_path: Path, damage: Callable[[Path], Any], why: str
) -> None:
    copy = copytree(folder, tmp_path / "1")
    damage(copy)
    with pytest.raises(LoadError, match=why):
        load(copy)


def test_a_model_of_another_task_has_no_adapters(tmp_path: Path) -> None:
    (tiny_models.bert(tmp_path / "1") / "adapters" / "x").mkdir(parents=True)
    with pytest.raises(LoadError, match="adapters are for models that generate text, this is one for embedding"):
        load(tmp_path / "1")
