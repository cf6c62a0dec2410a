"""A model that stands in for another one while llama.cpp reads a chat template: it has no weights of its own.

It has one layer of zeros, the 256 bytes as tokens, and the two tokens that a template can name. llama.cpp opens it in
10 ms.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

#: The answer to a chat before it is open.
CLOSED: Final = b"closed"
_WIDTH: Final = 32
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6


def write_stand_in(path: Path, templates: Mapping[str, str], begin: str, end: str) -> None:
    """Write the GGUF file ``path`` with the members ``templates``.

    ``begin`` and ``end`` are the tokens at the two ends of a text.
    """
    tokens = ["<unk>", begin, end, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    members: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": 256,
        "llama.embedding_length": _WIDTH,
        "llama.block_count": 1,
        "llama.feed_forward_length": _WIDTH,
        "llama.rope.dimension_count": _WIDTH,
        "llama.attention.head_count": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, _NORMAL],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **templates,
    }
    shapes = {"token_embd": (_WIDTH, len(tokens)), "output": (_WIDTH, len(tokens)), "output_norm": (_WIDTH,)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (_WIDTH, _WIDTH)
    shapes |= {"blk.0.attn_norm": (_WIDTH,), "blk.0.ffn_norm": (_WIDTH,)}
    entries, size = b"", 0
    for name, shape in shapes.items():
        entries += _string(f"{name}.weight") + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        entries += struct.pack("<IQ", 0, size)
        size += 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)  # always a multiple of the alignment
    head = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(members))
    head += b"".join(_string(name) + _value(value) for name, value in members.items()) + entries
    path.write_bytes(head + bytes(-len(head) % 32 + size))


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    if type(value) is list:
        kind = {str: _STRING, float: _FLOAT32, int: _INT32}[type(value[0])]
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + b"".join(map(_item, value))
    return struct.pack("<I", {str: _STRING, float: _FLOAT32, int: _UINT32}[type(value)]) + _item(value)


def _item(value: Any) -> bytes:
    return _string(value) if type(value) is str else struct.pack("<f" if type(value) is float else "<i", value)
