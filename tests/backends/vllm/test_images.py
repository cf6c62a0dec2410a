"""Images for vLLM itself, with a model of two layers and random weights. `test_message_media` has the bounds."""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from PIL import Image

from headrace_vllm.prompts import decode_bounded_forms_only
from tests.backends.vllm.test_message_media import fli_in_jpeg

if TYPE_CHECKING:
    from tests.conftest import Headrace

TOKENS = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
)
SIDE = 56


@pytest.fixture(scope="module")
def idefics(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Idefics3: of vLLM's models that read images, one that needs no torchvision."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    made = tmp_path_factory.mktemp("idefics")
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "max_position_embeddings": 1024, "pad_token_id": 2}
    config = transformers.Idefics3Config(
        vision_config={**layers, "image_size": SIDE, "patch_size": 14},
        text_config={**layers, **text, "num_key_value_heads": 2, "head_dim": 32},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=2,
        scale_factor=2,
    )
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(made)
    size = {"longest_edge": SIDE}
    images = Idefics3ImageProcessorPil(size=size, max_image_size=size, do_image_splitting=False)
    transformers.Idefics3Processor(
        image_processor=images, tokenizer=tokenizer, image_seq_len=4, chat_template=TEMPLATE
    ).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def server(idefics: Path, tmp_path_factory: pytest.TempPathFactory, keep_serving: Callable[..., Headrace]) -> Headrace:
    repository = tmp_path_factory.mktemp("models")
    (repository / "see/1").mkdir(parents=True)
    (repository / "see/config.pbtxt").write_text('backend: "vllm"')
    usual = {"dtype": "float32", "max_model_len": 512, "enforce_eager": True, "max_num_seqs": 4}
    text = json.dumps({"model": str(idefics), **usual, "kv_cache_memory_bytes": 1 << 28})
    (repository / "see/1/model.json").write_text(text)
    return keep_serving(f"--model-repository={repository}")


def file(color: str, side: int = 40) -> str:
    made = io.BytesIO()
    Image.new("1" if side > SIDE else "RGB", (side, side), color).save(made, "PNG")
    return base64.b64encode(made.getvalue()).decode()


def generate(server: Headrace, prompt: str, *images: str) -> tuple[int, dict[str, Any]]:
    sampling = json.dumps({"max_tokens": 1, "temperature": 0, "logprobs": 1})
    body = {"text_input": prompt, "image": list(images), "sampling_parameters": sampling, "return_logprobs": True}
    url = f"http://127.0.0.1:{server.http}/v2/models/see/generate"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")  # of PyTorch, when vLLM imports it
def test_vllm_itself_decodes_the_bounded_forms_only() -> None:
    from vllm.multimodal.media import ImageMediaIO

    fli, reader = fli_in_jpeg(), ImageMediaIO()
    with pytest.warns(Image.DecompressionBombWarning), pytest.raises(ValueError, match="truncated"):
        reader.load_bytes(fli)
    decode_bounded_forms_only()
    assert reader.load_bytes(fli).media.size == (40, 30)


def test_an_image_changes_the_answer(server: Headrace) -> None:
    answers = [generate(server, "<image>what?", file(color)) for color in ("red", "blue", "red")]
    assert [status for status, _ in answers] == [200] * 3
    red, blue, again = (answer["logprobs"] for _, answer in answers)
    assert red == again != blue


@pytest.mark.parametrize(
    ("prompt", "images", "told"),
    [
        ("what?", [file("red")], "needs the model's token for images once for each of 1 images"),
        ("<image>what?", [file("red")] * 2, "needs the model's token for images once for each of 2 images"),
        ("<image>what?", [file("red")[:80]], "truncated"),
        ("<image>what?", [file("white", 8193)], "image 1 has 8193 x 8193 pixels"),
    ],
    ids=["no place", "one place for two", "truncated", "too large"],
)
def test_images_that_cannot_be_used_are_the_fault_of_the_caller(
    server: Headrace, prompt: str, images: list[str], told: str
) -> None:
    status, answer = generate(server, prompt, *images)
    assert (status, told in answer["error"]) == (400, True), answer
