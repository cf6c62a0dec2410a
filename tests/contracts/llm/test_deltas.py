"""The printed form of log probabilities, as Triton's vLLM backend has it."""

from __future__ import annotations

import json

import pytest

from headrace_llm import TokenLogprob, print_logprobs, read_logprobs

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
