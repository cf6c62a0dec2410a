"""``/v1/completions``, with the stock client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

PARTS = [
    {"text_output": "one", "num_input_tokens": 4, "num_output_tokens": 1},
    {"text_output": " two", "finish_reason": "length", "num_input_tokens": 4, "num_output_tokens": 1},
]
SCRIPT = json.dumps(PARTS)


def test_a_prompt_is_continued(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt=SCRIPT, max_tokens=2)
    assert [choice.text for choice in answer.choices] == ["one two"]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert answer.usage.total_tokens == 6
    stream = client.completions.create(
        model="scripted", prompt=SCRIPT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert [chunk.choices[0].text for chunk in chunks[:-1]] == ["one", " two"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].usage
    assert chunks[-1].usage.total_tokens == 6


def test_the_least_model_answers(client: openai.OpenAI) -> None:
    assert client.completions.create(model="story", prompt="a b c").choices[0].text == " a b c"
    stream = client.completions.create(model="story", prompt="a b c", stream=True)
    assert [chunk.choices[0].text for chunk in stream] == [" a", " b", " c", ""]


@pytest.mark.parametrize("stop", ["d e", ["x", "c d", "d e"]])
def test_a_model_need_not_know_stop_strings(client: openai.OpenAI, stop: Any) -> None:
    """They may be of several parts."""
    expected = " a b c " if stop == "d e" else " a b "
    answer = client.completions.create(model="story", prompt="a b c d e f", stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    chunks = list(client.completions.create(model="story", prompt="a b c d e f", stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert client.completions.create(model="story", prompt="a b c", stop="c d").choices[0].text == " a b c"


def test_several_prompts_have_several_answers(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="story", prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, " a"), (1, " a"), (2, " b"), (3, " b")]
    answer = client.completions.create(model="scripted", prompt=[SCRIPT, SCRIPT], n=2)
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 8)


def test_prompts_of_tokens_reach_the_model(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted", prompt=[5, 6, 7])
    assert json.loads(answer.choices[0].text)["input_ids"] == [5, 6, 7]
    answer = client.completions.create(model="scripted", prompt=[[5, 6], [7, 8]])
    assert [json.loads(choice.text)["input_ids"] for choice in answer.choices] == [[5, 6], [7, 8]]


def test_an_echo_comes_before_the_answer(client: openai.OpenAI) -> None:
    assert client.completions.create(model="story", prompt="a b", echo=True).choices[0].text == "a b a b"
    stream = client.completions.create(model="story", prompt="a b", echo=True, stream=True)
    assert [chunk.choices[0].text for chunk in stream] == ["a b", " a", " b", ""]


def test_log_probabilities(client: openai.OpenAI) -> None:
    entries = (("5", -0.5, "ab"), ("6", -0.1, "c"))
    token = {name: {"logprob": value, "rank": 1, "decoded_token": text} for name, value, text in entries}
    script = json.dumps([{"text_output": "ab", "logprobs": [token]}] * 2)
    for stream in (False, True):
        answer: Any = client.completions.create(model="scripted", prompt=script, logprobs=1, stream=stream)
        found = [choice.logprobs for each in (answer if stream else [answer]) for choice in each.choices]
        found = [each for each in found if each]
        assert [token for each in found for token in each.tokens] == ["ab", "ab"]
        assert [value for each in found for value in each.token_logprobs] == [-0.5, -0.5]
        assert [place for each in found for place in each.text_offset] == [0, 2]
        assert found[0].top_logprobs[0] == {"c": -0.1, "ab": -0.5}
    parts = [b"a\xf0", b"\x9f", b"\x98\x8a", b"b"]
    tokens = [{"5": {"logprob": 0, "rank": 1, "decoded_token": "", "bytes": list(part)}} for part in parts]
    script = json.dumps([{"text_output": "a😊b", "logprobs": tokens}])
    given = client.completions.create(model="scripted", prompt=script, logprobs=0).choices[0].logprobs
    assert given
    assert given.tokens == [r"bytes:\x61\xf0", r"bytes:\x9f", r"bytes:\x98\x8a", "b"]
    assert given.text_offset == [0, 1, 1, 2]
    answer = client.completions.create(model="scripted", prompt="show", logprobs=0)
    assert json.loads(answer.choices[0].text)["return_logprobs"] is True


def test_an_adapter_is_named_behind_the_model(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="scripted:kind", prompt="show")
    assert json.loads(answer.choices[0].text)["sampling_parameters"] == {"lora_name": "kind"}
    assert answer.model == "scripted:kind"
    with pytest.raises(openai.BadRequestError, match="model 'story' has no adapters"):
        client.completions.create(model="story:kind", prompt="show")


@pytest.mark.parametrize(
    ("members", "text", "param"),
    [
        ({"prompt": None}, "prompt must be a string, an array of strings, or tokens, got nothing", "prompt"),
        ({"prompt": ""}, "not empty", "prompt"),
        ({"prompt": []}, "prompt must be", "prompt"),
        ({"prompt": [["a"]]}, "token 'a'", "prompt"),
        ({"prompt": [1, 2**31]}, "token 2147483648", "prompt"),
        ({"prompt": [1, -1]}, "token -1", "prompt"),
        ({"prompt": [1, True]}, "token True", "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1] must be text or tokens", "prompt"),
        ({"prompt": ["a"] * 200}, "has 200 prompts, the limit is 128", "prompt"),
        ({"prompt": ["a"] * 2, "n": 128}, "make 256 answers, the limit is 128", "prompt"),
        ({"best_of": 5}, "best_of is 5, and n is 1", "best_of"),
        ({"suffix": "x"}, "suffix is not supported", "suffix"),
        ({"echo": True, "logprobs": 1}, "echo and logprobs", "echo"),
        ({"echo": True, "prompt": [1]}, "echo needs prompts of text", "echo"),
        ({"logprobs": 50}, "from 0 to 20", "logprobs"),
        ({"model": "story", "prompt": [1, 2]}, "model 'story' has no prompts of tokens", "prompt"),
        ({"model": "story", "logprobs": 1}, "model 'story' has no logprobs", "logprobs"),
        ({"model": "embed"}, "model 'embed' does embedding, this path is for generation", "model"),
    ],
)
def test_a_wrong_member_is_named(web: httpx.Client, members: dict[str, Any], text: str, param: str) -> None:
    answer = web.post("/completions", json={"model": "scripted", "prompt": SCRIPT, **members})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert text in error["message"]
    assert error["param"] == param
