"""Chats with SmolLM2 on llama.cpp, by the stock client: what the engine says itself is what the client gets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pydantic
import pytest

from headrace import Server
from headrace_testing.serving import serve
from tests.backends.llamacpp.conftest import weights
from tests.backends.llamacpp.smol import ask, put_model, text
from tests.conftest import wait_until
from tests.frontends.openai.test_chat import calls_in

__all__ = ["weights"]

SETTINGS = {"context": "256", "slots": "2", "max_streams": "16", "threads": "1", "isolation": "thread"}
ASKED: Any = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"town": {"enum": ["Paris", "Rome"]}},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


class Town(pydantic.BaseModel):
    is_capital: bool


@pytest.fixture(scope="module")
def here(weights: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in this process."""
    repository = tmp_path_factory.mktemp("real")
    put_model(repository, "smol", weights, SETTINGS)
    with serve(repository, listen=True) as server:
        yield server


@pytest.fixture(scope="module")
def smol(here: Server) -> Iterator[openai.OpenAI]:
    base = f"http://127.0.0.1:{here.options.http_port}/v1"
    with openai.OpenAI(base_url=base, api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_is_what_the_engine_says(here: Server, smol: openai.OpenAI) -> None:
    own = text(ask(here, messages=ASKED))
    answer = smol.chat.completions.create(model="smol", messages=ASKED, temperature=0, max_tokens=8)
    assert answer.choices[0].message.content == own
    assert own
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage
    assert 0 < answer.usage.completion_tokens <= 8
    stream = smol.chat.completions.create(
        model="smol", messages=ASKED, temperature=0, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == own
    assert len([each for each in texts if each]) > 4
    assert chunks[-1].usage == answer.usage


def test_a_prompt_is_continued(here: Server, smol: openai.OpenAI) -> None:
    own = text(ask(here, "Once upon a", "exclude_input_in_output"))
    answer = smol.completions.create(model="smol", prompt="Once upon a", temperature=0, max_tokens=8)
    assert answer.choices[0].text == own
    first = own.split()[-1]
    answer = smol.completions.create(model="smol", prompt="Once upon a", temperature=0, max_tokens=8, stop=first)
    assert first not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


def test_choices_have_log_probabilities(smol: openai.OpenAI) -> None:
    answer = smol.chat.completions.create(
        model="smol", messages=ASKED, n=2, seed=1, max_tokens=3, logprobs=True, top_logprobs=2
    )
    for choice in answer.choices:
        assert choice.logprobs
        tokens = choice.logprobs.content or []
        assert "".join(token.token for token in tokens) == choice.message.content
        assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in tokens)


def test_an_answer_is_an_object_of_a_class(smol: openai.OpenAI) -> None:
    answer = smol.chat.completions.parse(
        model="smol", messages=ASKED, response_format=Town, temperature=0, max_tokens=20
    )
    assert isinstance(answer.choices[0].message.parsed, Town)


def test_a_tool_that_must_be_called_is_called(smol: openai.OpenAI) -> None:
    """llama.cpp itself does not force it."""
    named = {"type": "function", "function": {"name": "weather"}}
    asked: Any = {"tools": [TOOL], "tool_choice": named, "temperature": 0, "max_tokens": 20}
    with smol.chat.completions.stream(model="smol", messages=ASKED, **asked) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    ((name, arguments),) = calls_in(choice.message)
    assert name == "weather"
    assert arguments["town"] in ("Paris", "Rome")


def metric(server: Server, name: str) -> float:
    """Return the value of a metric of the one model."""
    return next(each.value for family in server.engine.collect() for each in family.samples if each.name == name)


def test_callers_that_leave_free_their_slots(here: Server) -> None:
    """Each asks for 200 tokens and reads one."""
    before = metric(here, "nv_llm_output_tokens")

    async def scenario() -> None:
        base = f"http://127.0.0.1:{here.options.http_port}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:
            for _ in range(4):
                stream = await client.chat.completions.create(
                    model="smol", messages=ASKED, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
                )
                async for _chunk in stream:
                    break
                await stream.close()
            answer = await client.chat.completions.create(model="smol", messages=ASKED, max_tokens=2)
            assert answer.usage
            assert answer.usage.completion_tokens == 2

    asyncio.run(asyncio.wait_for(scenario(), 60))
    wait_until(lambda: metric(here, "nv_llm_streams") == 0, "the engine has no request")
    assert metric(here, "nv_llm_output_tokens") - before < 200


def test_what_the_engine_refuses_is_an_error(smol: openai.OpenAI) -> None:
    long: Any = [{"role": "user", "content": "word " * 1000}]
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="context"):
            smol.chat.completions.create(model="smol", messages=long, stream=stream)
