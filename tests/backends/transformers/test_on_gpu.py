"""Adapters, images, embeddings and memory on a GPU; the oracle is transformers on the same GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace import BackendError
from tests.backends.transformers import tiny_models
from tests.backends.transformers.conftest import Given, Loop, strings
from tests.backends.transformers.test_adapters import ADAPTERS, PROMPT, SAMPLING, add_adapters, merged
from tests.backends.transformers.test_images import chat, encoded, part, picture

DEVICE, KIND = "cuda:0", "KIND_GPU"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this PyTorch finds no GPU"),
]
TEXTS = ["The quick brown fox", "one two", "naïve"]


def long_llama(folder: Path) -> Path:
    return tiny_models.llama(folder, context=1 << 15)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    path = tmp_path_factory.mktemp("gpu")
    write_model(path, "chat", add_adapters, KIND, cache_tokens="8192")
    write_model(path, "half", tiny_models.llama, KIND, cache_tokens="8192", dtype="bfloat16")
    write_model(path, "long", long_llama, KIND, continuous_batching="false")
    write_model(path, "see", tiny_models.llava, KIND)
    write_model(path, "embed", tiny_models.bert, KIND)
    return path


@pytest.fixture(scope="module")
def loop(start_server: Callable[..., Loop], repository: Path) -> Loop:
    return start_server(repository, model_control_mode="explicit", load_model=("chat", "half", "long", "see", "embed"))


def generate(model: Any, made: Any, most: int) -> list[int]:
    tokens = model.generate(**made.to(DEVICE), do_sample=False, max_new_tokens=most, eos_token_id=-1)
    found: list[int] = tokens[0, made["input_ids"].shape[1] :].tolist()
    return found


def test_each_request_has_its_adapter(loop: Loop, repository: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(repository / "chat" / "1")

    async def ask() -> list[Given]:
        names = ["", *ADAPTERS]
        return await asyncio.gather(
            *[loop.ask("chat", PROMPT, sampling={**SAMPLING, "lora_name": name}) for name in names]
        )

    for name, given in zip(["", *ADAPTERS], loop.run(ask()), strict=True):
        model = merged(repository / "chat" / "1", name, tmp_path / f"{name}.again").to(DEVICE)
        assert given.ids == generate(model, tokenizer(PROMPT, return_tensors="pt"), 16)


def test_the_type_of_the_weights_is_the_one_of_the_config(loop: Loop, repository: Path) -> None:
    folder = repository / "half" / "1"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(DEVICE)
    given = loop.run(loop.ask("half", PROMPT, sampling={"temperature": 0, "max_tokens": 8, "ignore_eos": True}))
    assert given.ids == generate(model, tokenizer(PROMPT, return_tensors="pt"), 8)


def test_tokens_after_an_image_are_those_of_generate(loop: Loop, repository: Path) -> None:
    folder, image = repository / "see" / "1", picture(0)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).to(DEVICE)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "what?"}]
    made = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        add_generation_prompt=True,
    )
    sampling = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    given = loop.run(loop.ask("see", chat(part(encoded(image)), "what?"), sampling=sampling))
    assert given.ids == generate(model, made, 12)


def test_vectors_are_those_of_the_model(loop: Loop, repository: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(repository / "embed" / "1")
    model = transformers.AutoModel.from_pretrained(repository / "embed" / "1").to(DEVICE)
    with torch.inference_mode():
        rows = [model(**tokenizer(text, return_tensors="pt").to(DEVICE))[0][0].mean(0) for text in TEXTS]
    sent = {"text": strings(*TEXTS).reshape((3, 1))}
    given = loop.run(loop.server.infer_async("embed", sent)).outputs["embedding"]
    np.testing.assert_allclose(np.asarray(given), torch.stack(rows).cpu().numpy(), atol=1e-3)


def test_a_request_without_memory_fails_alone(loop: Loop) -> None:
    """All memory of the GPU is taken: a long prompt has none, a short one goes on."""
    short = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    long = [5] * 30000

    async def ask(*prompts: Any) -> list[Any]:
        return await asyncio.gather(
            *[loop.ask("long", each, sampling=short) for each in prompts], return_exceptions=True
        )

    loop.run(ask(*["hi"] * 4))  # each thread gets its workspaces
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - (16 << 20), dtype=torch.uint8, device=DEVICE)
    given, failed = loop.run(ask("hi", long))
    assert isinstance(given, Given), given
    assert len(given.ids) == 40
    assert isinstance(failed, BackendError), failed
    assert "OutOfMemoryError" in str(failed)
    del ballast
    torch.cuda.empty_cache()
    (again,) = loop.run(ask(long))
    assert len(again.ids) == 40


def test_the_memory_of_an_unloaded_model_is_free(loop: Loop) -> None:
    loop.run(loop.server.unload("half"))
    base = torch.cuda.memory_allocated()
    loop.run(loop.server.load("half"))
    assert torch.cuda.memory_allocated() > base
    loop.run(loop.server.unload("half"))

    async def wait_for_it() -> None:
        while torch.cuda.memory_allocated() > base:
            await asyncio.sleep(0.05)

    loop.run(asyncio.wait_for(wait_for_it(), 20))
