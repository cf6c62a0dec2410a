"""What is generated, against llama.cpp itself, greedily."""

from __future__ import annotations

import re
from typing import Any

import orjson
import pytest

from headrace import Server
from headrace_llm import read_logprobs
from tests.backends.llamacpp.smol import CALL, ask, direct, numbers, text

PROMPT = "Once upon a time"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


def test_the_text_is_that_of_llama_cpp_in_one_response_and_in_many(server: Server, engine: Any) -> None:
    (expected,) = direct(engine, prompt=PROMPT, n_predict=12, temperature=0, n_probs=1)
    words = expected["choices"][0]["text"]
    asked = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_output_ids")
    given = ask(server, PROMPT, "stream", *asked, sampling={"max_tokens": 12})
    assert text(given) == words
    assert len(given) > 6
    assert numbers(given, "output_ids") == [token["id"] for token in expected["choices"][0]["logprobs"]["content"]]
    assert sum(numbers(given, "num_output_tokens")) == expected["usage"]["completion_tokens"] == 12
    assert set(numbers(given, "num_input_tokens")) == {expected["usage"]["prompt_tokens"]}
    assert text(given[-1:], "finish_reason") == "length"
    assert text(ask(server, PROMPT, sampling={"max_tokens": 12})) == PROMPT + words
    assert text(ask(server, PROMPT, "exclude_input_in_output", sampling={"max_tokens": 12})) == words


def test_a_chat_has_the_template_of_the_model(server: Server, engine: Any) -> None:
    (expected,) = direct(engine, messages=CHAT, temperature=0, max_tokens=8)
    given = ask(server, "", "return_finish_reason", "return_num_input_tokens", messages=CHAT)
    assert text(given) == expected["choices"][0]["message"]["content"]
    assert text(given, "finish_reason") == expected["choices"][0]["finish_reason"]
    assert numbers(given, "num_input_tokens") == [expected["usage"]["prompt_tokens"]]


def test_tokens_and_a_prompt_of_tokens(server: Server, engine: Any) -> None:
    ids = numbers(ask(server, PROMPT, "return_output_ids", sampling={"max_tokens": 6}), "output_ids")
    (expected,) = direct(engine, prompt=ids, n_predict=4, temperature=0)
    assert text(ask(server, input_ids=ids, sampling={"max_tokens": 4})) == expected["choices"][0]["text"]


def test_log_probabilities_are_those_of_llama_cpp(server: Server, engine: Any) -> None:
    (expected,) = direct(engine, prompt=PROMPT, n_predict=4, temperature=0, n_probs=3)
    given = ask(
        server, PROMPT, "return_logprobs", "return_cumulative_logprob", sampling={"max_tokens": 4, "logprobs": 3}
    )
    tokens = expected["choices"][0]["logprobs"]["content"]
    found = read_logprobs(text(given, "logprobs"))
    assert [(each.id, each.text) for each in found] == [(each["id"], each["token"]) for each in tokens]
    assert [each.logprob for each in found] == pytest.approx([each["logprob"] for each in tokens], abs=1e-4)
    assert [len(each.top) for each in found] == [3] * 4
    assert numbers(given, "cumulative_logprob") == pytest.approx([sum(each["logprob"] for each in tokens)], abs=1e-3)


def test_sampling_reaches_llama_cpp(server: Server) -> None:
    plain = text(ask(server, PROMPT, "stream", sampling={"max_tokens": 12}))
    word = plain.split()[3]
    stopped = ask(server, PROMPT, "stream", "return_finish_reason", sampling={"max_tokens": 12, "stop": word})
    assert text(stopped) == plain[: plain.index(word)]
    assert text(stopped[-1:], "finish_reason") == "stop"
    begun = {"max_tokens": 12, "stop": plain[-1] + "no", "logprobs": 0}  # may be a stop string until the end
    given = ask(server, PROMPT, "stream", "return_logprobs", sampling=begun)
    assert text(given) == plain
    tokens = [each for part in given for each in read_logprobs(text([part], "logprobs"))]
    assert "".join(each.text for each in tokens) == plain
    random = {"temperature": 1.5, "top_k": 50, "top_p": 0.9, "seed": 7}
    once, again = (text(ask(server, PROMPT, "stream", sampling=random)) for _ in range(2))
    assert once == again != text(ask(server, PROMPT, "stream", sampling={**random, "seed": 8}))
    (token, *_) = numbers(ask(server, "A", "return_output_ids", sampling={"max_tokens": 1}), "output_ids")
    biased = ask(server, PROMPT, "return_output_ids", sampling={"max_tokens": 2, "logit_bias": {str(token): 100}})
    assert numbers(biased, "output_ids") == [token] * 2


SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("structured", "fits"),
    [
        ({"json": SCHEMA}, lambda said: type(orjson.loads(said)["age"]) is int),
        ({"regex": r"[a-c]{2}/\d\n?"}, lambda said: re.fullmatch(r"[a-c]{2}/\d\n?", said)),
        ({"choice": ['a "b"', "ünder"]}, lambda said: said in ('a "b"', "ünder")),
        ({"grammar": 'root ::= ("x" | "yz")+ "."'}, lambda said: re.fullmatch(r"(x|yz)+\.", said)),
        ({"grammar": 'start: "p" NUMBER\nNUMBER: /[0-9]{3}/'}, lambda said: re.fullmatch(r"p\d{3}", said)),
    ],
    ids=["json", "regex", "choice", "gbnf", "lark"],
)
def test_structured_outputs_hold(server: Server, structured: Any, fits: Any) -> None:
    biased = {"198": -100, "216": -100, "1116": -100} if "json" in structured else {}  # white space without end
    sampling = {"max_tokens": 40, "structured_outputs": structured, "logit_bias": biased, "stop": []}
    given = ask(server, "Say:", "stream", "return_finish_reason", sampling=sampling)
    assert text(given[-1:], "finish_reason") == "stop", text(given)
    assert fits(text(given)), text(given)


def test_characters_of_several_tokens_arrive_whole_and_are_counted(server: Server) -> None:
    sampling = {"max_tokens": 20, "structured_outputs": {"regex": "😀🎉"}}
    given = ask(server, "x", "stream", "return_num_output_tokens", sampling=sampling)
    assert [text([each]) for each in given if text([each])] == ["😀", "🎉"]
    assert sum(numbers(given, "num_output_tokens")) > 4


def test_an_adapter_changes_the_requests_that_name_it_and_no_other(server: Server, engine: Any) -> None:
    (expected,) = direct(engine, prompt=PROMPT, n_predict=6, temperature=0)
    plain = text(ask(server, PROMPT, "stream", sampling={"max_tokens": 6}))
    loud = text(ask(server, PROMPT, "stream", sampling={"max_tokens": 6, "lora_name": "loud"}))
    again = text(ask(server, PROMPT, "stream", sampling={"max_tokens": 6}))
    assert plain == again == expected["choices"][0]["text"] != loud


def test_tools_are_called_as_llama_cpp_calls_them(server: Server, engine: Any) -> None:
    function = {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}},
    }
    tools = [{"type": "function", "function": function}]
    asked: dict[str, Any] = {"messages": CHAT, "tools": tools, "tool_choice": "required"}
    expected = direct(engine, **asked, temperature=0, max_tokens=5, stream=True)
    given = ask(server, "", "stream", "return_finish_reason", **asked, sampling={"max_tokens": 5})
    content = [chunk["choices"][0]["delta"].get("content") or "" for chunk in expected]
    assert text(given) == "".join(content) != ""


@pytest.mark.parametrize("choice", ["auto", "required", "get_weather", "none"])
@pytest.mark.parametrize("streams", [True, False])
def test_a_call_that_a_model_writes_is_one_unless_there_are_no_tools(
    server: Server, choice: str, streams: bool
) -> None:
    """With ``auto`` the model decides, and this one always calls."""
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": choice}} if choice == "get_weather" else choice
    asked = {"messages": CHAT, "tools": tools, "tool_choice": named, "sampling": {"max_tokens": 50}}
    given = ask(server, "", *["stream"] * streams, "return_finish_reason", model="scripted", **asked)
    if choice == "none":
        assert text(given) == "".join(CALL).replace("\u2581", " ")
        assert text(given[-1:], "finish_reason") == "stop"
        return
    deltas = [each for response in given for each in orjson.loads(text([response], "tool_calls") or "[]")]
    assert [each["function"]["name"] for each in deltas if each["function"].get("name")] == ["get_weather"]
    arguments = "".join(each["function"].get("arguments", "") for each in deltas)
    assert orjson.loads(arguments) == {"city": "Paris"}
    assert text(given).strip() == "I look."
    assert text(given[-1:], "finish_reason") == "tool_calls"
