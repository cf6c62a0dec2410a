"""Tiny models with random weights, in the form of Hugging Face: each is made and saved in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

torch.set_num_threads(1)  # several would spin on the cores that the server needs

TEXTS = ["The quick brown fox jumps over the lazy dog, naïve café.", '{"name": "x", "n": 12345}', "one two three four"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<|assistant|>"
)
#: The same with the places of images.
IMAGE_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}{% endfor %}<|assistant|>"
)
VOCABULARY = 340


def write_tokenizer(folder: Path, template: str = TEMPLATE) -> Any:
    """Bytes, some pairs of them, and ``<s>`` (0), ``</s>`` (1), ``<pad>`` (2), which no text has by itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = template or None
    made.save_pretrained(folder)
    return made


def save(model: Any, folder: Path, template: str = TEMPLATE, **generation: Any) -> Path:
    write_tokenizer(folder, template)
    if model.can_generate():
        for name, value in generation.items():
            setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    return folder


def llama(folder: Path, template: str = TEMPLATE, context: int = 128, **generation: Any) -> Path:
    """A decoder of two layers."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        initializer_range=0.5,
    )
    return save(transformers.LlamaForCausalLM(config), folder, template, **generation)


def gguf(folder: Path) -> Path:
    """The same model as a GGUF file."""
    from gguf import GGUFWriter

    source = llama(folder / "source")
    model, tokenizer = (
        kind.from_pretrained(source) for kind in (transformers.AutoModelForCausalLM, transformers.AutoTokenizer)
    )
    writer = GGUFWriter(folder / "tiny.gguf", "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(document["model"]["vocab"], key=document["model"]["vocab"].get))
    writer.add_token_types([3] * 3 + [1] * (VOCABULARY - 3))
    writer.add_token_merges([" ".join(pair) for pair in document["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
    }  # fmt: skip
    for name, tensor in model.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        values = tensor.numpy()
        for key, count in heads.items():  # llama.cpp's order of rotary pairs
            if key in name:
                values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    rmtree(source)
    return folder


def mamba(folder: Path) -> Path:
    """A state-space model, for which there is no continuous batching."""
    torch.manual_seed(2)
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, bos_token_id=0, eos_token_id=1
    )
    return save(transformers.MambaForCausalLM(config), folder)


def t5(folder: Path) -> Path:
    torch.manual_seed(3)
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=2,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = transformers.T5ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return save(model, folder)


def bert(folder: Path, kind: str = "BertModel", **config: Any) -> Path:
    torch.manual_seed(4)
    made = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.5,
        pad_token_id=2,
        **config,
    )
    return save(getattr(transformers, kind)(made), folder)


def whisper(folder: Path) -> Path:
    """A model that hears a second at a time, and writes at most 24 tokens."""
    torch.manual_seed(5)
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=50,
        max_target_positions=24,
        decoder_start_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        init_std=0.5,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    write_tokenizer(folder)
    transformers.WhisperFeatureExtractor(
        feature_size=8, chunk_length=1, sampling_rate=16000, hop_length=160
    ).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def timed_whisper(folder: Path) -> Path:
    """A `whisper` with the tokens of Whisper: two languages, and a timestamp for each 0.02 s."""
    torch.manual_seed(6)
    words = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
             "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]  # fmt: skip
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    times = [f"<|{place / 50:.2f}|>" for place in range(51)]
    vocabulary = {each: place for place, each in enumerate([*letters, *words])}
    tokenizer = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"extra_special_tokens": words[1:]})
    tokenizer.add_tokens([transformers.AddedToken(each, special=False) for each in times])
    ids = {each: tokenizer.convert_tokens_to_ids(each) for each in [*words, *times]}
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_source_positions=50,
        max_target_positions=40,
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|endoftext|>"],
        pad_token_id=ids["<|endoftext|>"],
        init_std=0.6,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        is_multilingual=True,
        lang_to_id={each: ids[each] for each in ("<|en|>", "<|de|>")},
        task_to_id={each: ids[f"<|{each}|>"] for each in ("transcribe", "translate")},
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        max_initial_timestamp_index=25,
        max_length=30,
        alignment_heads=[[0, 0], [0, 1]],
    )
    tokenizer.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(
        feature_size=8, chunk_length=1, sampling_rate=16000, hop_length=160
    ).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def llava(folder: Path) -> Path:
    """A `llama` that reads images of 16 by 16 pixels as four tokens each."""
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    torch.manual_seed(7)
    tokenizer = write_tokenizer(folder, IMAGE_TEMPLATE)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image>"]})
    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        projection_dim=16,
    )
    text = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
            image_seq_length=4,
            vision_feature_layer=-1,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.4)
    size = {"height": 16, "width": 16}
    transformers.LlavaProcessor(
        image_processor=LlavaImageProcessorPil(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=IMAGE_TEMPLATE,
    ).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder
