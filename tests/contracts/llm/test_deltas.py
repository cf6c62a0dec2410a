"""The printed form of log probabilities, as Triton's vLLM backend has it."""

from __future__ import annotations

import json

import pytest

from headrace_llm import TokenLogprob, print_logprobs, read_logprobs, token_bytes, token_text

TOP = ((7, " a", -0.5), (8, " b", -1.5))


@pytest.mark.parametrize(
    ("token", "rank"),
    [
        (TokenLogprob(8, " b", -1.5, TOP), 2),
        (TokenLogprob(9, " c", -4.0, TOP), 3),  # behind those that are known
        (TokenLogprob(9, " c", -4.0, TOP, rank=17), 17),
        (TokenLogprob(9, " c", -4.0, rank=17), 17),
    ],
)
def test_the_chosen_token_is_first_and_has_its_rank(token: TokenLogprob, rank: int) -> None:
    (printed,) = json.loads(print_logprobs([token]))
    assert next(iter(printed)) == str(token.id)
    assert printed[str(token.id)] == {"logprob": token.logprob, "rank": rank, "decoded_token": token.text}
    assert len(printed) == len({token.id, *(other for other, _, _ in token.top)})
    (read,) = read_logprobs(print_logprobs([token]))
    assert (read.id, read.text, read.logprob) == (token.id, token.text, token.logprob)


def test_a_token_that_is_no_whole_characters_has_its_bytes() -> None:
    """Of an emoji; and of half a surrogate pair, which is no text at all."""
    tokens = [TokenLogprob(1, token_text(each), -1.0, [(1, token_text(each), -1.0)]) for each in (b"\xf0\x9f", b"\x98")]
    printed = print_logprobs([*tokens, TokenLogprob(2, "\ud800", -1.0)])
    first, _, last = (next(iter(each.values())) for each in json.loads(printed))
    assert (first["decoded_token"], first["bytes"]) == ("\N{REPLACEMENT CHARACTER}", [0xF0, 0x9F])
    assert (last["decoded_token"], last["bytes"]) == ("?", [0x3F])
    read = read_logprobs(printed)
    assert [token_bytes(each.text) for each in read] == [b"\xf0\x9f", b"\x98", b"?"]
    assert [token_bytes(text) for _, text, _ in read[1].top] == [b"\x98"]
