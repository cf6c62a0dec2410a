"""From the contract's sampling parameters to the arguments of vLLM's, without vLLM. With it: `test_with_engine`."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest

from headrace import BytesTensor, InferRequest, InvalidArgument
from headrace_llm import GenerationRequest, read_generation
from headrace_vllm.sampling_parameters import MAX_ITEMS, sampling_arguments, template_arguments


def request(chat: bool = False, wants: str = "", **sampling: Any) -> GenerationRequest:
    inputs: dict[str, Any] = {"sampling_parameters": BytesTensor.from_items([orjson.dumps(sampling)], (1,))}
    prompt = b'[{"role": "user", "content": "a"}]' if chat else b"a"
    inputs["messages" if chat else "text_input"] = BytesTensor.from_items([prompt], (1,))
    if wants:
        inputs[wants] = np.array([True])
    return read_generation(InferRequest("m", inputs))


def test_a_prompt_has_16_tokens_and_a_chat_has_no_limit() -> None:
    assert sampling_arguments(request(), {})["max_tokens"] == 16
    assert sampling_arguments(request(chat=True), {})["max_tokens"] is None
    assert sampling_arguments(request(chat=True, max_tokens=3), {})["max_tokens"] == 3


def test_what_is_not_said_is_the_models_own_default() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "stop_token_ids": [7]}
    found = sampling_arguments(request(temperature=0, stop_token_ids=[8, 7]), defaults)
    assert (found["temperature"], found["top_k"], found["stop_token_ids"]) == (0, 20, [8, 7])
    assert not {"top_p", "min_p", "repetition_penalty"} & found.keys()
    assert sampling_arguments(request(), defaults)["stop_token_ids"] == [7]


def test_every_common_member_arrives() -> None:
    said: dict[str, Any] = {
        "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "presence_penalty": 1.0,
        "frequency_penalty": -1.0, "repetition_penalty": 1.1, "seed": 3, "ignore_eos": True, "logprobs": 2,
        "max_tokens": 9,
    }  # fmt: skip
    found = sampling_arguments(request(**said, stop="x", logit_bias={"5": 1}), {})
    assert found == {**said, "stop": ["x"], "logit_bias": {5: 1.0}}


def test_the_least_top_p_is_the_most_likely_token() -> None:
    found = sampling_arguments(request(top_p=0, top_k=9), {})
    assert found["top_k"] == 1
    assert "top_p" not in found


@pytest.mark.parametrize("wants", ["return_logprobs", "return_cumulative_logprob"])
def test_who_wants_log_probabilities_gets_those_of_the_chosen_tokens(wants: str) -> None:
    assert sampling_arguments(request(wants=wants), {})["logprobs"] == 0
    assert sampling_arguments(request(), {})["logprobs"] is None


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"best_of": 2}, "member 'best_of', which vLLM does not have"),
        ({"skip_special_tokens": 1}, "must be true or false, got 1"),
        ({"stop_token_ids": [-1]}, "must be an array of tokens"),
        ({"stop_token_ids": 7}, "must be an array of tokens"),
        ({"allowed_token_ids": [True]}, "must be an array of tokens"),
        ({"bad_words": [""]}, "none empty"),
        ({"bad_words": ["a"] * (MAX_ITEMS + 1)}, f"the limit is {MAX_ITEMS}"),
        ({"thinking_token_budget": -2}, "from -1 to"),
    ],
)
def test_a_wrong_member_is_refused_with_its_name(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        sampling_arguments(request(**wrong), {})


def test_arguments_of_the_template_are_no_template() -> None:
    given = {"enable_thinking": False}
    assert template_arguments(request(chat=True, chat_template_kwargs=given)) == given
    assert template_arguments(request(chat=True)) is None
    for wrong, told in (
        (request(chat=True, chat_template_kwargs={"chat_template": "{{"}), "the template is the model's own"),
        (request(chat=True, chat_template_kwargs=7), "must be a JSON object"),
        (request(chat_template_kwargs=given), "goes with messages"),
    ):
        with pytest.raises(InvalidArgument, match=told):
            template_arguments(wrong)
