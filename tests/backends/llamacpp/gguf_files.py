"""Writes GGUF files: a tiny model of random numbers, one with a fixed answer, and an adapter.

Source: the specification of GGUF.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tensors = Mapping[str, npt.NDArray[np.float32]]
_UINT, _FLOAT, _STRING, _ARRAY = 4, 6, 8, 9


def write_gguf(path: Path, members: Mapping[str, Any], tensors: Tensors) -> None:
    """Write ``members``, which are numbers, strings and lists of them, and ``tensors``."""
    entries, data = b"", b""
    for name, tensor in tensors.items():
        axes = struct.pack(f"<I{tensor.ndim}Q", tensor.ndim, *reversed(tensor.shape))
        entries += _string(name) + axes + struct.pack("<IQ", 0, len(data))
        data += tensor.astype("<f4").tobytes()
        data += bytes(-len(data) % 32)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(members))
    head += b"".join(_string(name) + _value(value) for name, value in members.items()) + entries
    path.write_bytes(head + bytes(-len(head) % 32) + data)


def write_adapter(path: Path) -> None:
    """Write a LoRA adapter for SmolLM2, which changes the first layer by random numbers."""
    rank, width = 4, 576
    rng = np.random.default_rng(3)
    members = {"general.architecture": "llama", "general.type": "adapter", "adapter.type": "lora"}
    tensors = {
        "blk.0.attn_q.weight.lora_a": rng.normal(0, 1, (rank, width)).astype(np.float32),
        "blk.0.attn_q.weight.lora_b": rng.normal(0, 1, (width, rank)).astype(np.float32),
    }
    write_gguf(path, {**members, "adapter.lora.alpha": 4.0}, tensors)


def write_tiny(path: Path, width: int = 64) -> None:
    """Write a model of one layer whose tokens are the 256 bytes. It computes a token in about 50 µs."""
    rng = np.random.default_rng(5)
    tensors = {name: rng.normal(0, 1, shape).astype(np.float32) for name, shape in _shapes(len(BYTES), width).items()}
    tensors["output.weight"][:3] = tensors["output.weight"][3 + 128 :] = 0  # it writes ASCII
    write_gguf(path, _members(BYTES, width), tensors)


def write_scripted(path: Path, pieces: Sequence[str]) -> None:
    """Write a model that answers to a prompt with a line end at its end: with ``pieces``, one token each, and its end.

    Its layer adds nothing. So the next token depends on the last one only.
    """
    tokens = [*BYTES, *pieces]
    width = 64
    tensors = {name: np.zeros(shape, np.float32) for name, shape in _shapes(len(tokens), width).items()}
    for name, tensor in tensors.items():
        if name.endswith("_norm.weight"):
            tensor[:] = 1
    chain = [BYTES.index("<0x0A>"), *range(len(BYTES), len(tokens)), BYTES.index("</s>")]
    for place, (last, following) in enumerate(itertools.pairwise(chain)):
        tensors["token_embd.weight"][last, place] = tensors["output.weight"][following, place] = 1
    write_gguf(path, _members(tokens, width), tensors)


BYTES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]


def _members(tokens: Sequence[str], width: int) -> dict[str, Any]:
    further = len(tokens) - len(BYTES)
    return {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.context_length": 2048,
        "llama.embedding_length": width,
        "llama.block_count": 1,
        "llama.feed_forward_length": width,
        "llama.rope.dimension_count": width,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (1 + further)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _shapes(tokens: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (tokens, width), "output": (tokens, width)}
    shapes["output_norm"] = (width,)
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (width, width)
    shapes |= {"blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,)}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    if type(value) is list:
        kind = {str: _STRING, float: _FLOAT, int: 5}[type(value[0])]
        items = b"".join(
            _string(each) if kind == _STRING else struct.pack("<f" if kind == _FLOAT else "<i", each) for each in value
        )
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items
    if type(value) is str:
        return struct.pack("<I", _STRING) + _string(value)
    return struct.pack("<If", _FLOAT, value) if type(value) is float else struct.pack("<II", _UINT, value)
