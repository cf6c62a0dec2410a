"""The bytes of tokens, against transformers' own table of letters where it is installed."""

from __future__ import annotations

import pytest

from headrace_llm import piece_text, token_bytes


@pytest.mark.parametrize(
    ("piece", "decoded", "data"),
    [
        ("the", "the", b"the"),
        ("\u00e2\u0124\u00ac", "\u20ac", "\u20ac".encode()),  # whole: as it was decoded
        ("\u00e2\u0124", "\ufffd", b"\xe2\x82"),
        ("\u0120\u00f0\u0141", " \ufffd", b" \xf0\x9f"),
        ("<0xE2>", "\ufffd", b"\xe2"),
        ("\u2581\ufffd", "\ufffd", "\ufffd".encode()),  # the character itself
    ],
)
def test_a_part_of_a_character_keeps_its_bytes(piece: str, decoded: str, data: bytes) -> None:
    assert token_bytes(piece_text(piece, decoded)) == data


def test_all_bytes_have_the_letters_of_gpt_2() -> None:
    slow = pytest.importorskip("transformers.convert_slow_tokenizer")
    for byte, letter in slow.bytes_to_unicode().items():
        assert token_bytes(piece_text(letter, "\ufffd")) == bytes([byte])
