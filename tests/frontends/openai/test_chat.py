"""``/v1/chat/completions``, with the stock client."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest

from headrace import InvalidArgument
from headrace_openai.tool_choices import plan_tools

PARTS = [
    {"text_output": "Héllo", "num_input_tokens": 7, "num_output_tokens": 1},
    {"text_output": " wörld", "num_input_tokens": 7, "num_output_tokens": 2},
    {"text_output": "", "finish_reason": "length", "num_input_tokens": 7, "num_output_tokens": 0},
]
TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}},
}


def say(content: Any) -> Any:
    """Return messages that make the model play ``content``, a script or "show"."""
    return [{"role": "user", "content": content if isinstance(content, str) else json.dumps(content)}]


def shown(client: openai.OpenAI, model: str = "scripted", **more: Any) -> dict[str, Any]:
    """Return the inputs that the model has got."""
    answer = client.chat.completions.create(model=model, messages=more.pop("messages", say("show")), **more)
    found: dict[str, Any] = json.loads(answer.choices[0].message.content or "")
    return found


def test_a_chat_is_answered_with_its_usage(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=say(PARTS))
    assert answer.choices[0].message.content == "Héllo wörld"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.model == "scripted"
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)


def test_a_long_conversation_is_read_with_its_calls_and_images(client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 200_000}"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": "y" * 300})}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "What is this?"}, image]},
        {"role": "assistant", "content": "wait", "tool_calls": [call]},
        *say("show"),
    ]
    assert shown(client, messages=messages)["messages"] == messages


def test_a_stream_has_a_chunk_for_each_part_and_its_usage_at_the_end(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="scripted", messages=say(PARTS), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert [delta.content for delta in deltas] == ["", "Héllo", " wörld", None]
    assert [delta.role for delta in deltas] == ["assistant", None, None, None]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None, None, None, "length"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1].usage
    assert chunks[-1].usage.total_tokens == 10
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_done(web: httpx.Client) -> None:
    body = {"model": "scripted", "messages": say(PARTS), "stream": True}
    answer = web.post("/chat/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.endswith("\n\ndata: [DONE]\n\n")
    assert "usage" not in answer.text


def test_the_asynchronous_client_streams(server: Any) -> None:
    async def scenario() -> None:
        base = f"http://127.0.0.1:{server.http}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:

            async def ask(word: str) -> str:
                script = [{"text_output": word}] * 3
                stream = await client.chat.completions.create(model="scripted", messages=say(script), stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            assert await asyncio.gather(*map(ask, "abcdefgh")) == [letter * 3 for letter in "abcdefgh"]

    asyncio.run(scenario())


def test_characters_that_the_model_splits_are_whole(client: openai.OpenAI) -> None:
    script = [{"text_output": {"hex": each}} for each in ("f09f", "988a62", "c3")]
    stream = client.chat.completions.create(model="scripted", messages=say(script), stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "😊b\N{REPLACEMENT CHARACTER}"


def test_the_members_reach_the_model(client: openai.OpenAI) -> None:
    given = shown(
        client, max_completion_tokens=5, temperature=0.5, top_p=0.9, seed=3, stop=["§a", "§b"], logit_bias={"7": -100},
        presence_penalty=1, user="someone", metadata={"a": "b"}, store=False,
        extra_body={"top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "unheard": 1,
                    "priority": 9},
        extra_headers={"x-request-id": "mine"},
    )  # fmt: skip
    assert given["sampling_parameters"] == {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["§a", "§b"], "logit_bias": {"7": -100},
        "presence_penalty": 1, "top_k": 4, "min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True,
    }  # fmt: skip
    assert given["messages"] == say("show")
    assert given["stream"] is False
    assert given["exclude_input_in_output"] is True
    assert (
        given["return_finish_reason"] is given["return_num_input_tokens"] is given["return_num_output_tokens"] is True
    )
    assert "return_logprobs" not in given
    assert given["id"] == "mine"


def test_text_parts_are_joined_and_a_developer_is_the_system(client: openai.OpenAI) -> None:
    text = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: Any = [{"role": "developer", "content": text}, *say("show")]
    assert shown(client, messages=messages)["messages"][0] == {"role": "system", "content": "a\nb"}


def test_images_are_data_and_nothing_is_fetched(client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages: Any = [{"role": "user", "content": [image]}, *say("show")]
    assert shown(client, messages=messages)["messages"][0]["content"] == [image]
    assert shown(client, "templated", messages=messages)["image"] == "AAAA"
    for address in ("http://127.0.0.1:8000/v2", "file:///etc/passwd", "/etc/passwd"):
        image["image_url"] = {"url": address}
        with pytest.raises(openai.BadRequestError, match="must be a data URL"):
            shown(client, messages=messages)


def test_several_choices_are_several_requests(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="scripted", messages=say("show"), n=3, seed=7)
    given = [json.loads(choice.message.content or "") for choice in answer.choices]
    assert [each["sampling_parameters"]["seed"] for each in given] == [7, 8, 9]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for seed, seeds in (("7", [7, 8]), (2**63 - 1, [2**63 - 1, -(2**63)])):
        answer = client.chat.completions.create(model="scripted", messages=say("show"), n=2, extra_body={"seed": seed})
        given = [json.loads(choice.message.content or "") for choice in answer.choices]
        assert [each["sampling_parameters"]["seed"] for each in given] == seeds
    stream = client.chat.completions.create(
        model="scripted", messages=say(PARTS), n=2, stream=True, stream_options={"include_usage": True}
    )
    texts, last = ["", ""], None
    for chunk in stream:
        last = chunk
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["Héllo wörld"] * 2
    assert last
    assert last.usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (7, 6)


def test_log_probabilities(client: openai.OpenAI) -> None:
    token = {
        "5": {"logprob": -0.5, "rank": 2, "decoded_token": "é"},
        "6": {"logprob": -0.1, "rank": 1, "decoded_token": "\ufffd", "bytes": [0xF0, 0x9F]},
    }
    script = [{"text_output": "é", "logprobs": [token]}]
    answer = client.chat.completions.create(model="scripted", messages=say(script), logprobs=True, top_logprobs=1)
    assert answer.choices[0].logprobs
    (found,) = answer.choices[0].logprobs.content or []
    assert (found.token, found.logprob, found.bytes) == ("é", -0.5, [0xC3, 0xA9])
    assert [(each.bytes, each.logprob) for each in found.top_logprobs] == [([0xF0, 0x9F], -0.1)]
    assert shown(client, logprobs=True, top_logprobs=1)["sampling_parameters"]["logprobs"] == 1


def test_reasoning_is_apart(client: openai.OpenAI) -> None:
    script = [{"text_output": "", "reasoning": "hm"}, {"text_output": "yes"}]
    message = client.chat.completions.create(model="scripted", messages=say(script)).choices[0].message
    assert (message.content, message.model_extra) == ("yes", {"reasoning_content": "hm"})


# ------------------------------------------------------------------------------------------------- tools


def calls_in(message: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of the calls in ``message``."""
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]


def test_tool_calls_of_the_model_are_gathered(client: openai.OpenAI) -> None:
    def call(**function: str) -> list[Any]:
        return [{"index": 0, "function": function}]

    script = [
        {"text_output": "", "tool_calls": call(name="weather", arguments="")},
        {"text_output": "", "tool_calls": call(arguments='{"town":')},
        {"text_output": "", "tool_calls": call(arguments='"Ulm"}')},
        {"text_output": "", "finish_reason": "tool_calls"},
    ]
    choice = client.chat.completions.create(model="scripted", messages=say(script), tools=[TOOL]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert calls_in(choice.message) == [("weather", {"town": "Ulm"})]
    assert choice.message.tool_calls
    assert choice.message.tool_calls[0].type == "function"
    assert choice.message.tool_calls[0].id.startswith("call_")
    with client.chat.completions.stream(model="scripted", messages=say(script), tools=[TOOL]) as stream:
        assert calls_in(stream.get_final_completion().choices[0].message) == [("weather", {"town": "Ulm"})]


def test_tools_and_their_choice_reach_the_model(client: openai.OpenAI) -> None:
    given = shown(client, tools=[TOOL])
    assert (given["tools"], given["tool_choice"]) == ([TOOL], "auto")
    assert "tools" not in shown(client, tools=[TOOL], tool_choice="none")


def test_only_a_model_without_sampling_parameters_forces_calls_itself() -> None:
    class Model:
        name, outputs, template, tool_call_parser = "m", frozenset(("text_output", "tool_calls")), None, None
        inputs = frozenset(("messages", "tools", "tool_choice"))

    model: Any = Model()
    plan = plan_tools({"tools": [TOOL], "tool_choice": "required"}, model)
    assert (plan.inputs[1], plan.constraint) == (b'"required"', None)
    model.inputs = frozenset(("messages", "tools"))
    with pytest.raises(InvalidArgument, match="model 'm' can not be forced to call a tool"):
        plan_tools({"tools": [TOOL], "tool_choice": "required"}, model)


@pytest.mark.parametrize("pieces", [1, 7, 1000])
def test_tool_calls_in_the_text_are_found(client: openai.OpenAI, pieces: int) -> None:
    text = 'I ask. <tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call>'
    text += '<tool_call>{"name": "weather", "arguments": {"town": "Bonn"}}</tool_call>'
    script = [{"text_output": text[at : at + pieces]} for at in range(0, len(text), pieces)]
    choice = client.chat.completions.create(model="templated", messages=say(script), tools=[TOOL]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("I ask. ", "tool_calls")
    assert calls_in(choice.message) == [("weather", {"town": "Ulm"}), ("weather", {"town": "Bonn"})]
    choice = client.chat.completions.create(
        model="templated", messages=say(script), tools=[TOOL], parallel_tool_calls=False
    ).choices[0]
    assert calls_in(choice.message) == [("weather", {"town": "Ulm"})]


def test_a_tool_is_forced_by_structured_output(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for model in ("templated", "scripted"):
        script = [{"text_output": '{"town":'}, {"text_output": '"Ulm"}'}]
        answer = client.chat.completions.create(model=model, messages=say(script), tools=[TOOL], tool_choice=named)
        assert calls_in(answer.choices[0].message) == [("weather", {"town": "Ulm"})]
        assert answer.choices[0].finish_reason == "tool_calls"
    answer = client.chat.completions.create(model="scripted", messages=say("show"), tools=[TOOL], tool_choice=named)
    ((_, given),) = calls_in(answer.choices[0].message)
    assert given["sampling_parameters"]["structured_outputs"] == {"json": TOOL["function"]["parameters"]}
    assert "tools" not in given
    assert json.dumps(TOOL["function"]["name"]) in given["messages"][0]["content"]
    given = shown(client, tools=[TOOL], tool_choice="required")  # it is no call, and so it is text
    (forced,) = given["sampling_parameters"]["structured_outputs"]["json"]["anyOf"]
    assert forced["properties"] == {"name": {"const": "weather"}, "arguments": TOOL["function"]["parameters"]}
    assert (forced["required"], forced["additionalProperties"]) == (["name", "arguments"], False)
    script = [{"text_output": '{"name": "weather", "arguments": {"town": "Ulm"}}'}]
    answer = client.chat.completions.create(
        model="templated", messages=say(script), tools=[TOOL], tool_choice="required"
    )
    assert calls_in(answer.choices[0].message) == [("weather", {"town": "Ulm"})]


def test_a_call_of_a_tool_that_was_not_offered_reaches_the_caller(client: openai.OpenAI) -> None:
    """As in vLLM's own server: clients answer the model that there is no such tool, and it tries again."""
    text = '<tool_call>{"name": "wether", "arguments": {}}</tool_call>'
    for model, part in (
        ("templated", {"text_output": text}),
        ("scripted", {"tool_calls": [{"index": 0, "function": {"name": "wether", "arguments": "{}"}}]}),
    ):
        choice = client.chat.completions.create(model=model, messages=say([part]), tools=[TOOL]).choices[0]
        assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
        assert calls_in(choice.message) == [("wether", {})]


# ------------------------------------------------------------------------------------- structured output


def test_a_class_of_pydantic_is_parsed(client: openai.OpenAI) -> None:
    class Town(pydantic.BaseModel):
        name: str
        people: int

    script = [{"text_output": '{"name": "Ulm", '}, {"text_output": '"people": 130000}'}]
    answer = client.chat.completions.parse(model="scripted", messages=say(script), response_format=Town)
    assert answer.choices[0].message.parsed == Town(name="Ulm", people=130000)
    schema: Any = {"type": "json_schema", "json_schema": {"name": "town", "schema": Town.model_json_schema()}}
    given = shown(client, response_format=schema)
    assert given["sampling_parameters"]["structured_outputs"] == {"json": Town.model_json_schema()}
    given = shown(client, response_format={"type": "json_object"})
    assert given["sampling_parameters"]["structured_outputs"] == {"json_object": True}


# --------------------------------------------------------------------------------------------- templates


def test_a_model_without_messages_gets_what_its_template_makes_of_them(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be kind."}, *say("show")]
    given = shown(client, "templated", messages=messages, extra_body={"chat_template_kwargs": {"mood": ":)"}})
    assert given["text_input"] == "<system>Be kind.\n<user>show\n:)<assistant>§show"
    assert given["sampling_parameters"] == {"max_tokens": 4096}
    given = shown(client, "templated", messages=messages, tools=[TOOL])
    assert given["text_input"].startswith(f"Tools: {json.dumps([TOOL])}\n<system>")


def test_a_model_with_nothing_but_a_prompt_gets_a_line_for_each_message(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="story", messages=say("Hello there"))
    assert answer.choices[0].message.content == " user: Hello there assistant:"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage
    assert answer.usage.total_tokens == 0


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "system", "content": "x"}], "refuses the messages: there is only a system message"),
        (say("loop"), "runs more than 1000000 steps"),
    ],
)
def test_a_template_that_refuses_or_loops_is_an_error(client: openai.OpenAI, messages: Any, text: str) -> None:
    with pytest.raises(openai.BadRequestError, match=text):
        client.chat.completions.create(model="templated", messages=messages)


# ------------------------------------------------------------------------------------------------ errors


def test_an_error_before_the_first_part_has_a_status_and_one_behind_it_is_an_event(
    client: openai.OpenAI, web: httpx.Client
) -> None:
    for stream in (True, False):
        with pytest.raises(openai.InternalServerError, match="oh no"):
            client.chat.completions.create(model="scripted", messages=say([{"error": "oh no"}]), stream=stream)
    script = [{"text_output": "a"}, {"error": "oh no"}]
    stream_of_chunks = client.chat.completions.create(model="scripted", messages=say(script), stream=True)
    with pytest.raises(openai.APIError, match="oh no"):
        list(stream_of_chunks)
    answer = web.post("/chat/completions", json={"model": "scripted", "messages": say(script), "stream": True})
    *_, last = answer.text.strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"


def test_a_caller_that_leaves_ends_the_request(web: httpx.Client, models: Path) -> None:
    left = models / "scripted/1/left"
    for count in (1, 2):
        left.unlink(missing_ok=True)
        body = {"model": "scripted", "messages": say("wait"), "stream": True, "n": count}
        with web.stream("POST", "/chat/completions", json=body) as answer:
            assert "waiting" in next(text for text in answer.iter_text() if "waiting" in text)
        while not left.exists():
            web.get("/models")
    left.unlink()
    with pytest.raises(httpx.ReadTimeout):
        web.post("/chat/completions", json={"model": "scripted", "messages": say("wait")}, timeout=0.2)
    while not left.exists():
        web.get("/models")


BAD: Sequence[tuple[dict[str, Any], str, str | None]] = [
    ({"model": None}, "model must be the name of a model", "model"),
    ({"model": "a" * 1025}, "model has 1025 characters, the limit is 1024", "model"),
    ({"messages": None}, "at least one message", "messages"),
    ({"messages": "hello"}, "messages must be an array, got 'hello'", "messages"),
    ({"messages": [1]}, r"messages\[0\] must be an object, got 1", "messages[0]"),
    ({"messages": [{"role": "king", "content": "x"}]}, "must be one of system, ", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "content must be a string or an array", "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "type must be one of text", None),
    ({"messages": [{"role": "user", "content": "x"}] * 5000}, "has 5000 members, the limit is 4096", "messages"),
    ({"n": 10**9}, "n must be a whole number from 1 to 128, got 1000000000", "n"),
    ({"n": 128, "messages": say("a" * 2_200_000)}, "bytes of the body must be at most 268435456, not 28", "n"),
    ({"n": 0}, "n must be a whole number from 1 to 128, got 0", "n"),
    ({"max_tokens": 0}, "max_tokens must be a whole number from 1 to", "max_tokens"),
    ({"max_tokens": -1}, "max_tokens must be", "max_tokens"),
    ({"max_completion_tokens": 10**30}, "max_tokens must be", "max_tokens"),
    ({"temperature": "hot"}, "temperature must be a number", "temperature"),
    ({"stop": ["x"] * 10_000}, "stop has 10000 strings, the limit is 16", "stop"),
    ({"logit_bias": {"a": 1}}, "a token of logit_bias must be", None),
    ({"top_logprobs": 5}, "top_logprobs needs logprobs", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "from 0 to 20", "top_logprobs"),
    ({"stream": "yes"}, "stream must be true or false, got 'yes'", "stream"),
    ({"stream_options": {}}, "", None),
    ({"stream_options": {"include_usage": True}}, "needs stream to be true", "stream_options"),
    ({"tools": [{"type": "gun"}]}, "must be 'function', got 'gun'", "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "1 to 64 letters", "tools[0].function.name"),
    ({"tool_choice": "required"}, "there are no tools", "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of tools", "tool_choice"),
    ({"functions": []}, "use tools", "functions"),
    ({"response_format": {"type": "xml"}}, "must be one of text, json_object, json_schema", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "must be a JSON schema, got nothing", "response_format"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "two constraints", None),
    ({"structured_outputs": {"choice": 5}}, "must be an array of strings", "structured_outputs"),
    ({"chat_template": "{{ 7 * 7 }}"}, "can not have another", "chat_template"),
]


@pytest.mark.parametrize(("members", "text", "param"), BAD, ids=[str(members)[:40] for members, _, _ in BAD])
def test_a_wrong_member_is_named(web: httpx.Client, members: dict[str, Any], text: str, param: str | None) -> None:
    body = {"model": "scripted", "messages": say(PARTS), **members}
    answer = web.post("/chat/completions", json=body)
    if not text:
        assert answer.status_code == 200
        return
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert re.search(text, error["message"]), error
    if param is not None:
        assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "empty"),
        (b"[]", "must be a JSON object"),
        (b'{"model": ', "failed to parse"),
        (b'{"model": "scripted", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}', "temperature"),
        (b'{"model": "scripted", "messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"model": "scripted", "x": NaN, "messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
        (b'{"model": "scripted", "messages": [%b0]}' % (b'"%b",' % (b"x" * 60_000) * 80), "besides long strings"),
        (b'{"model": "scripted", "messages": %b%b}' % (b"[" * 200, b"]" * 200), "depth"),
    ],
    ids=["empty", "array", "open", "nan", "half", "half beside nan", "large", "deep"],
)
def test_a_body_that_is_none_is_the_fault_of_the_caller(web: httpx.Client, body: bytes, text: str) -> None:
    answer = web.post("/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text[:500]
    assert text in answer.json()["error"]["message"]


@pytest.mark.parametrize("model", ["scripted", "templated"])
def test_large_texts_and_images_arrive_as_they_are(client: openai.OpenAI, model: str) -> None:
    """They are cut out of the body, and encoded in parts, on a thread."""
    text, image = 'é"\\\n😀x\u2028' * 30_000, "data:image/png;base64," + "QUJD" * 50_000
    parts = [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": image}}]
    messages: Any = [{"role": "system", "content": text}, {"role": "user", "content": parts}, *say("show")]
    given = shown(client, model=model, messages=messages)
    if model == "scripted":
        assert given["messages"][:2] == messages[:2]
    else:
        assert text in given["text_input"]
        assert given["image"] == "QUJD" * 50_000
