"""Tool calls in texts, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_llm import ToolCallParser
from headrace_openai.chat_answers import ChatText
from headrace_openai.choices import Usage
from headrace_openai.response_items import ResponseItems
from headrace_openai.text_responses import TextPart
from headrace_openai.tool_call_parsers import PARSERS, AnyToolParser, NamedToolParser

CALL = '{"name": "weather", "arguments": {"town": "Ulm"}}'
LLAMA = '{"name": "weather", "parameters": {"town": "Ulm"}}'
WEATHER = ("weather", {"town": "Ulm"})
#: The parser, a text, what of it is text, and the calls.
TEXTS: list[tuple[str, str, str, list[Any]]] = [
    ("hermes", f"So: <tool_call>\n{CALL}\n</tool_call>", "So: ", [WEATHER]),
    ("llama3_json", LLAMA, "", [WEATHER]),
    ("llama3_json", f"{LLAMA}; {LLAMA}", "", [WEATHER, WEATHER]),
    ("llama3_json", f"<|python_tag|>{LLAMA}", "", [WEATHER]),
    ("llama3_json", "It rains {a lot}.", "It rains {a lot}.", []),
    ("llama3_json", '{"town": "Ulm"}', '{"town": "Ulm"}', []),
    ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", "", [WEATHER, WEATHER]),
    ("mistral", '[TOOL_CALLS]weather[ARGS]{"town": "Ulm"}', "", [WEATHER]),
    ("mistral", '[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[ARGS]{"c": 1}', "", [("a", {}), ("b", {"c": 1})]),
    ("mistral", "[TOOL_CALLS]a[ARGS]oh", "[TOOL_CALLS]a[ARGS]oh", []),
    ("mistral", "[TO be", "[TO be", []),
]


def parse(parser: ToolCallParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """Return the text and the calls in ``pieces``, as a client gathers them."""
    texts, calls = [], dict[int, list[str]]()
    for text, parts in [*map(parser.feed, pieces), parser.end()]:
        texts.append(text)
        for part in parts:
            call = calls.setdefault(part["index"], ["", ""])
            call[0] += part["function"].get("name", "")
            call[1] += part["function"]["arguments"]
    return "".join(texts), [(name, json.loads(arguments)) for name, arguments in calls.values()]


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[begin:end] for begin, end in zip([0, *ends], [*ends, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "whole", "text", "calls"), TEXTS)
@given(places=st.lists(st.integers(0, 200), max_size=6))
@settings(max_examples=10)
def test_calls_are_found_however_the_text_is_cut(
    name: str, whole: str, text: str, calls: list[Any], places: list[int]
) -> None:
    assert parse(PARSERS[name](), cut(whole, places)) == (text, calls)
    assert parse(PARSERS[name](), list(whole)) == (text, calls)


@settings(max_examples=30)
@given(text=st.text("<>/tol_ca{}[]TOLCALS|; \n"), places=st.lists(st.integers(0, 200), max_size=4))
def test_a_text_without_calls_is_all_text(text: str, places: list[int]) -> None:
    for kind in PARSERS.values():
        assert parse(kind(), cut(text, places)) == (text, [])


def test_text_that_only_begins_like_a_call_is_not_held_for_ever() -> None:
    for name, begin in (("llama3_json", "{"), ("mistral", "[TOOL_CALLS]")):
        parser = PARSERS[name]()
        text = "".join(parser.feed(each)[0] for each in (begin, "x" * ToolCallParser.most_characters))
        assert len(text) == len(begin) + ToolCallParser.most_characters


@pytest.mark.parametrize(("name", "text"), [("llama3_json", " " * 200_000), ("mistral", "[TOOL_CALLS]" * 16_000)])
def test_the_time_is_proportional_to_the_length(name: str, text: str) -> None:
    """It is 0.1 s. A text that is put together again for each part takes 3 s."""
    began_s = process_time()
    assert parse(PARSERS[name](), list(text)) == (text, [])
    assert process_time() - began_s < 1


def test_forced_texts_are_calls() -> None:
    assert parse(AnyToolParser(), [CALL[:20], CALL[20:]]) == ("", [WEATHER])
    assert parse(AnyToolParser(), ['{"name": "wea']) == ('{"name": "wea', [])
    assert parse(NamedToolParser("weather"), ["", '{"town": ', '"Ulm"}']) == ("", [WEATHER])


def gathered_by_chats(pieces: list[str]) -> Any:
    text, parser = ChatText(0), NamedToolParser("weather")
    for piece in pieces:
        text.add(TextPart(tool_calls=parser.feed(piece)[1]))
    return text.document(0)["message"]["tool_calls"][0]["function"]


def gathered_by_responses(pieces: list[str]) -> Any:
    items, parser = ResponseItems({}, "m"), NamedToolParser("weather")
    for piece in pieces:
        list(items.add(TextPart(tool_calls=parser.feed(piece)[1])))
    list(items.end(Usage()))
    return items.document["output"][0]


@pytest.mark.parametrize("gathered", [gathered_by_chats, gathered_by_responses])
def test_long_arguments_are_gathered_in_proportional_time(gathered: Callable[[list[str]], Any]) -> None:
    """It is 0.1 s. Arguments that are put together again for each part take 6 s."""
    pieces = ["\U0001f4a7" * 64] * (1 << 14)
    began_s = process_time()
    call = gathered(pieces)
    assert process_time() - began_s < 1
    assert (call["name"], call["arguments"]) == ("weather", "".join(pieces))
