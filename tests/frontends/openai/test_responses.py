"""``/v1/responses`` by the stock client: text, events in OpenAI's order, tools, and what needs a store."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

#: Parts of an answer, which the model plays.
HELLO = [
    {"text_output": "Hel", "num_output_tokens": 1, "num_input_tokens": 4},
    {"text_output": "lo", "num_output_tokens": 1, "finish_reason": "stop"},
]
CALL = [
    {"reasoning": "I need", "text_output": ""},
    {"reasoning": " the sky", "text_output": ""},
    {"text_output": "Let me look."},
    {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city":'}}]},
    {"tool_calls": [{"index": 0, "function": {"arguments": '"Oslo"}'}}]},
    {"tool_calls": [{"index": 1, "id": "c2", "function": {"name": "clock", "arguments": "{}"}}]},
    {"text_output": "", "finish_reason": "tool_calls"},
]
TOOLS: Any = [
    {"type": "function", "name": name, "description": "tells it", "parameters": {"type": "object"}, "strict": True}
    for name in ("weather", "clock")
]


def shown(client: openai.OpenAI, **asked: Any) -> dict[str, Any]:
    """Return what the model was given."""
    found: dict[str, Any] = json.loads(client.responses.create(model="scripted", **asked).output_text)
    return found


def test_a_text_is_answered_by_a_text(client: openai.OpenAI) -> None:
    found = client.responses.create(model="scripted", input=json.dumps(HELLO), metadata={"a": "b"}, temperature=0.5)
    assert (found.output_text, found.status, found.object) == ("Hello", "completed", "response")
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (4, 2, 6)
    assert (found.model, found.metadata, found.temperature) == ("scripted", {"a": "b"}, 0.5)


def test_an_answer_that_ends_at_the_limit_is_incomplete(client: openai.OpenAI) -> None:
    script = json.dumps([{"text_output": "Hel", "finish_reason": "length"}])
    found = client.responses.create(model="scripted", input=script, max_output_tokens=3)
    assert found.status == "incomplete"
    assert found.incomplete_details is not None
    assert found.incomplete_details.reason == "max_output_tokens"


def test_events_come_in_openais_order(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="scripted", input=json.dumps(HELLO), stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(10))
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == "Hello"
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_clients_own_stream_gathers_text_and_calls(client: openai.OpenAI) -> None:
    with client.responses.stream(model="scripted", input=json.dumps(CALL), tools=TOOLS) as stream:
        kinds = [event.type.removeprefix("response.") for event in stream]
        found = stream.get_final_response()
    texts = ["delta", "delta", "done"]
    assert [kind for kind in kinds if kind.startswith("reasoning_text")] == [f"reasoning_text.{each}" for each in texts]
    assert [kind for kind in kinds if kind.startswith("function_call")] == [
        *[f"function_call_arguments.{each}" for each in texts],
        *[f"function_call_arguments.{each}" for each in texts[1:]],
    ]
    assert [each.type for each in found.output] == ["reasoning", "message", "function_call", "function_call"]
    assert found.output_text == "Let me look."
    calls = [(each.call_id, each.name, each.arguments) for each in found.output if each.type == "function_call"]
    assert calls == [("c1", "weather", '{"city":"Oslo"}'), ("c2", "clock", "{}")]


def likely(data: bytes, logprob: float) -> list[dict[str, Any]]:
    """Return the log probabilities of one token, whose bytes are ``data``."""
    token = {"logprob": logprob, "rank": 1, "decoded_token": data.decode(errors="replace"), "bytes": list(data)}
    return [{"7": token}]


LIKELY: list[dict[str, Any]] = [
    {"text_output": "", "reasoning": "Hm", "logprobs": likely(b"Hm", -1), "num_output_tokens": 3},
    {"text_output": {"hex": "c3"}, "logprobs": likely(b"\xc3", -0.5), "num_output_tokens": 1},
    {"text_output": {"hex": "a9"}, "logprobs": likely(b"\xa9", -0.25), "num_output_tokens": 1},
    {"text_output": "!\u2028", "finish_reason": "stop", "logprobs": likely(b"!", -0.125), "num_output_tokens": 1},
]


def test_log_probabilities_are_those_of_the_text(client: openai.OpenAI) -> None:
    """A character of two tokens comes with both."""
    asked: Any = {"input": json.dumps(LIKELY), "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    found = client.responses.create(model="scripted", **asked)
    (_, message) = found.output
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    tokens = message.content[0].logprobs or []
    assert [(bytes(each.bytes), each.logprob) for each in tokens] == [(b"\xc3", -0.5), (b"\xa9", -0.25), (b"!", -0.125)]
    assert [len(each.top_logprobs) for each in tokens] == [1, 1, 1]
    assert found.usage is not None
    assert (found.usage.output_tokens, found.usage.output_tokens_details.reasoning_tokens) == (6, 3)
    events = client.responses.create(model="scripted", stream=True, **asked)
    deltas = [(event.delta, len(event.logprobs)) for event in events if event.type == "response.output_text.delta"]
    assert deltas == [("é", 2), ("!\u2028", 1)]


def test_a_line_of_an_event_has_no_other_end(web: httpx.Client) -> None:
    body = {"model": "scripted", "input": json.dumps(LIKELY), "stream": True}
    assert not {"\x85", "\u2028", "\u2029"} & set(web.post("/responses", json=body).text)


def test_items_become_messages(client: openai.OpenAI) -> None:
    first = client.responses.create(model="scripted", input=json.dumps(CALL), tools=TOOLS)
    conversation: Any = [
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "be "}, {"type": "input_text", "text": "short"}],
        },
        {"role": "user", "content": "weather?"},
        *first.output,
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"role": "user", "content": "show"},
    ]
    given = shown(
        client, input=conversation, instructions="Be kind.", tools=TOOLS, extra_body={"seed": 5}, max_output_tokens=9
    )
    functions = [(each["id"], each["function"]["name"]) for each in given["messages"][3]["tool_calls"]]
    assert functions == [("c1", "weather"), ("c2", "clock")]
    assert [(each["role"], each["content"]) for each in given["messages"]] == [
        ("system", "Be kind."), ("system", "be short"), ("user", "weather?"), ("assistant", "Let me look."),
        ("tool", "rain"), ("tool", "noon"), ("user", "show"),
    ]  # fmt: skip
    assert [each["function"]["name"] for each in given["tools"]] == ["weather", "clock"]
    assert given["sampling_parameters"] == {"max_tokens": 9, "seed": 5}


def test_an_answer_may_have_the_form_of_a_class(client: openai.OpenAI) -> None:
    class City(BaseModel):
        name: str

    script = json.dumps([{"text_output": '{"name": "Oslo"}', "finish_reason": "stop"}])
    found = client.responses.parse(model="scripted", input=script, text_format=City)
    assert found.output_parsed == City(name="Oslo")
    given = shown(
        client, input="show", text={"format": {"type": "json_schema", "name": "c", "schema": {"type": "object"}}}
    )
    assert given["sampling_parameters"]["structured_outputs"] == {"json": {"type": "object"}}


def test_an_image_is_a_part_of_a_message(client: openai.OpenAI) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}
    given = shown(client, input=[{"role": "user", "content": [image]}, {"role": "user", "content": "show"}])
    assert given["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": image["image_url"]}}]


def test_an_error_is_the_status_or_the_last_event(client: openai.OpenAI) -> None:
    broken = [{"text_output": "Hel"}, {"error": "it broke"}]
    with pytest.raises(openai.InternalServerError, match="it broke"):
        client.responses.create(model="scripted", input=json.dumps(broken[1:]), stream=True)
    *_, last = client.responses.create(model="scripted", input=json.dumps(broken), stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "it broke" in last.response.error.message


@pytest.mark.parametrize(
    ("asked", "param", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"store": True}, "store", "nothing is stored"),
        ({"background": True}, "background", "given at once"),
        ({"conversation": "c"}, "conversation", "nothing is stored"),
        ({"truncation": "auto"}, "truncation", "an error"),
        ({"top_logprobs": 3}, "top_logprobs", "needs include to have 'message.output_text.logprobs'"),
        ({"top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs", "from 0 to 20"),
        ({"include": "message.output_text.logprobs"}, "include", "must be an array"),
        ({"input": []}, "input", "not empty"),
        ({"input": [3]}, "input", "input[0] must be a JSON object"),
        ({"input": [{"role": "user", "content": "a"}] * 4097}, "input", "input has 4097 items, the limit is 4096"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "the type 'item_reference', expected one of"),
        ({"input": [{"role": "king", "content": ""}]}, "input", "input[0].role must be one of user"),
        ({"input": [{"role": "user", "content": 3}]}, "input", "input[0].content must be a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input", "input[0].content[0] must be"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input", "no files"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input", "input[0].call_id must be a text"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0] must be of type function"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice", "auto, none, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "is none of tools"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "is none of tools"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"text": {"format": {"type": "grammar"}}}, "text", "text.format.type must be"),
        ({"instructions": 3}, "instructions", "must be a text"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"model": "embed"}, "model", "does embedding"),
    ],
)
def test_what_is_wrong_is_named(web: httpx.Client, asked: dict[str, Any], param: str, why: str) -> None:
    answer = web.post("/responses", json={"model": "scripted", "input": "show"} | asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert why in answer.json()["error"]["message"]
