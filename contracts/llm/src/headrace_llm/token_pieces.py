"""The bytes of a token that is no whole characters, such as a part of an emoji.

A tokenizer decodes it to U+FFFD. Its piece, the form in which the vocabulary has it, has the bytes in one of two forms:
in letters, as in GPT-2, or as ``<0xE2>``, as in SentencePiece.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from headrace_llm.deltas import token_text

_REPLACEMENT = "\ufffd"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_text(piece: str, decoded: str) -> str:
    """Return the text of a token as `headrace_llm.TokenLogprob` has it: ``decoded``, or its bytes if these are no whole
    characters. ``piece`` is the token in the vocabulary."""
    if _REPLACEMENT not in decoded:
        return decoded
    if found := _BYTE.fullmatch(piece):
        return token_text(bytes([int(found[1], 16)]))
    known = _bytes_by_letter()
    return token_text(bytes(known[each] for each in piece)) if known.keys() >= set(piece) else decoded


@cache
def _bytes_by_letter() -> Mapping[str, int]:
    """Return the bytes that GPT-2's letters stand for: printable characters of Latin-1 for themselves, the other bytes
    in order from U+0100. Source: ``bytes_to_unicode`` of https://github.com/openai/gpt-2/blob/master/src/encoder.py"""
    printable = (*range(33, 127), *range(161, 173), *range(174, 256))
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
