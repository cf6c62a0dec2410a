"""From tokens to text: stop strings and tool calls, wherever the parts are cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace_llm import Delta
from headrace_transformers.text_stream import TextStream
from headrace_transformers.tool_calls import ToolCallReader

TEXTS = st.text("ab<", max_size=12)


def parts_of(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({cut % (len(text) + 1) for cut in cuts} | {0, len(text)})
    return [text[begin:end] for begin, end in itertools.pairwise(places)] or [""]


CUTS = st.lists(st.integers(0, 400), max_size=12)


@given(TEXTS, st.lists(st.text("ab<", min_size=1, max_size=3), max_size=3), CUTS)
def test_a_text_ends_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    parts = parts_of(text, cuts)
    stream = TextStream(lambda place: parts[place], stops)
    made = ""
    for place in range(len(parts)):
        made += stream.add(place)
        if stream.has_stopped:
            break
    found = [text.index(stop) for stop in stops if stop in text]
    if not found:
        made += stream.rest()
    # A shorter stop string may be complete before one that begins earlier.
    assert stream.has_stopped == bool(found)
    assert text.startswith(made)
    assert not any(stop in made for stop in stops)
    if len(stops) == 1 and found:
        assert made == text[: found[0]]
    if not found:
        assert made == text


def read(parts: Sequence[str]) -> Delta:
    reader, whole = ToolCallReader(), Delta()
    for place, part in enumerate(parts):
        delta = Delta(part, finish_reason="stop" if place == len(parts) - 1 else "")
        reader.read(delta)
        whole.add(delta)
    return whole


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@given(CUTS)
def test_calls_are_taken_out_of_the_text(cuts: list[int]) -> None:
    whole = read(parts_of(f"Let me see.{CALL}\n{CALL}", cuts))
    assert whole.text == "Let me see."
    assert [each["index"] for each in whole.tool_calls] == [0, 1]
    assert {each["function"]["name"] for each in whole.tool_calls} == {"weather"}
    assert json.loads(whole.tool_calls[0]["function"]["arguments"]) == {"city": "Paris"}
    assert whole.finish_reason == "tool_calls"


@given(st.sampled_from(["<tool_call>{}</tool_call>", "<tool_call>[1", "a <tool", "<tool_call>x</tool_call>b"]), CUTS)
def test_what_is_no_call_stays_text(text: str, cuts: list[int]) -> None:
    whole = read(parts_of(text, cuts))
    assert (whole.text, whole.tool_calls, whole.finish_reason) == (text, [], "stop")
