"""Tool calls of a model whose text is scripted: a constraint allows one text only. The template is in Qwen's form."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers

from headrace import BytesTensor
from tests.backends.transformers import tiny_models
from tests.backends.transformers.conftest import Given, Loop

TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\nYou may call these:\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nA call is <tool_call>\\n{"name": <name>, "arguments": <object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {%- set call = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}"""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "How is Oslo?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Åsgård", "days": [1, 2.50]}}\n</tool_call>'
TWO = f"Well.\n{CALL}\n" + '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]) -> Path:
    path = tmp_path_factory.mktemp("tools")
    return write_model(path, "tools", partial(tiny_models.llama, template=TEMPLATE, context=2048))


@pytest.fixture(scope="module")
def loop(start_server: Callable[..., Loop], folder: Path) -> Loop:
    return start_server(folder.parents[1])


def ask(loop: Loop, text: str, *flags: str, tools: Any = TOOLS, choice: Any = "auto") -> Given:
    """Let the model write ``text``."""
    sampling = {"structured_outputs": {"choice": [text]}, "temperature": 0}
    return loop.run(loop.ask("tools", ASKED, *flags, sampling=sampling, tools=tools, tool_choice=choice))


def calls_in(given: Given) -> list[tuple[str, str]]:
    """Names and arguments, joined from the deltas as a client of OpenAI does."""
    found: dict[int, list[str]] = {}
    for response in given.responses:
        tensor = response.outputs.get("tool_calls")
        for delta in json.loads(b"".join(tensor.items())) if isinstance(tensor, BytesTensor) else ():
            call = found.setdefault(delta["index"], ["", ""])
            call[0] += delta["function"].get("name") or ""
            call[1] += delta["function"].get("arguments") or ""
    return [(name, arguments) for name, arguments in found.values()]


@pytest.mark.parametrize("flags", [(), ("stream",)], ids=["whole", "stream"])
def test_a_call_in_the_text_becomes_a_call(loop: Loop, flags: tuple[str, ...]) -> None:
    given = ask(loop, CALL, *flags)
    ((name, arguments),) = calls_in(given)
    assert (name, json.loads(arguments)) == ("weather", {"city": "Åsgård", "days": [1, 2.5]})
    assert (given.text, given.reason[-10:]) == ("", "tool_calls")


def test_several_calls_stand_behind_a_text(loop: Loop) -> None:
    given = ask(loop, TWO, "stream")
    assert [name for name, _ in calls_in(given)] == ["weather", "time"]
    assert given.text.rstrip() == "Well."


@pytest.mark.parametrize(("tools", "choice"), [(TOOLS, "none"), ([], "auto")])
def test_without_tools_the_text_stays(loop: Loop, tools: Any, choice: str) -> None:
    given = ask(loop, CALL, tools=tools, choice=choice)
    assert given.text == CALL
    assert given.reason == "stop"


@pytest.mark.parametrize(
    "text", ["<tool_call>{broken</tool_call>", '<tool_call>{"no": "name"}</tool_call>', "<tool_call"]
)
def test_what_is_no_call_stays_text(loop: Loop, text: str) -> None:
    given = ask(loop, text, "stream")
    assert given.text == text
    assert given.reason.endswith("stop")


def test_the_turns_after_a_call_are_those_of_the_template(loop: Loop, folder: Path) -> None:
    """Arguments come as a string of JSON, as OpenAI has them; templates print an object."""
    arguments = {"city": "Åsgård", "days": [1, 2.5]}
    called = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    sent = {**called, "function": {"name": "weather", "arguments": json.dumps(arguments)}}
    rest = {"role": "tool", "tool_call_id": "c1", "content": "Rain."}
    messages, printed = (
        [*ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}, rest] for call in (sent, called)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    text = tokenizer.apply_chat_template(printed, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert '"arguments": {"city": "Åsgård"' in text
    assert "<tool_response>\nRain." in text
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    expected = model.generate(ids, do_sample=False, max_new_tokens=8, eos_token_id=-1)[0, ids.shape[1] :].tolist()
    sampling = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
    assert loop.run(loop.ask("tools", messages, tools=TOOLS, sampling=sampling)).ids == expected
