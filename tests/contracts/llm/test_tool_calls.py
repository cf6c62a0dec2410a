"""Tool calls in the form of Hermes: found in a text, wherever its parts end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from time import process_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_llm import Delta, HermesParser, read_calls

CALL = '{"name": "weather", "arguments": {"town": "Ulm"}}'
WEATHER = ("weather", {"town": "Ulm"})
#: A text, what of it is text, and the calls.
TEXTS: list[tuple[str, str, list[Any]]] = [
    ("Hello <there>", "Hello <there>", []),
    (f"So: <tool_call>\n{CALL}\n</tool_call>", "So: ", [WEATHER]),
    (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [WEATHER, WEATHER]),
    (f"<tool_call>[{CALL}, {CALL}]</tool_call>", "", [WEATHER, WEATHER]),
    (f"<tool_call>{CALL}", "", [WEATHER]),
    (f"<tool_call>{CALL}</tool_call> Done. \n", " Done.", [WEATHER]),
    ("<tool_call>oh no</tool_call>b", "<tool_call>oh no</tool_call>b", []),
    ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("<tool_call>[1", "<tool_call>[1", []),
    ("a <tool_ca", "a <tool_ca", []),
]
CUTS = st.lists(st.integers(0, 200), max_size=8)


def take(whole: str, cuts: Sequence[int], reason: str = "stop") -> Delta:
    """Return ``whole``, which arrives in parts, with its calls."""
    parser, taken = HermesParser(), Delta()
    ends = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    for place, (begin, end) in enumerate(pairwise(ends), 2):
        delta = Delta(whole[begin:end], finish_reason=reason if place == len(ends) else "")
        parser.take(delta)
        taken.add(delta)
    return taken


@pytest.mark.parametrize(("whole", "text", "calls"), TEXTS)
@given(cuts=CUTS)
@settings(max_examples=10)
def test_calls_are_found_however_the_text_is_cut(whole: str, text: str, calls: list[Any], cuts: list[int]) -> None:
    for places in (cuts, range(len(whole))):
        taken = take(whole, places)
        assert taken.text == text
        assert taken.finish_reason == ("tool_calls" if calls else "stop")
        assert [each["index"] for each in taken.tool_calls] == [*range(len(calls))]
        assert len({each["id"] for each in taken.tool_calls}) == len(calls)
        functions = [each["function"] for each in taken.tool_calls]
        assert [(each["name"], json.loads(each["arguments"])) for each in functions] == calls


@settings(max_examples=30)
@given(text=st.text("<>/tol_ca{}[]; \n"), cuts=CUTS)
def test_a_text_without_calls_is_all_text(text: str, cuts: list[int]) -> None:
    taken = take(text, cuts)
    assert (taken.text, taken.tool_calls, taken.finish_reason) == (text, [], "stop")


def test_a_text_that_is_cut_off_keeps_its_reason() -> None:
    taken = take(f"<tool_call>{CALL}</tool_call>", (), "length")
    assert (len(taken.tool_calls), taken.finish_reason) == (1, "length")


def test_text_that_only_begins_like_a_call_is_not_held_for_ever() -> None:
    parser = HermesParser()
    text = "".join(parser.feed(each)[0] for each in ("<tool_call>", "x" * parser.most_characters))
    assert len(text) == len("<tool_call>") + parser.most_characters


@pytest.mark.parametrize(
    "pieces",
    [
        ["<tool_call>", *"<" * 150_000],
        [*"<tool_call>" * 15_000],
        [f"<tool_call>{CALL}</tool_call>", *" " * 150_000],
        ["<tool_call>1</tool_call>" * 60_000],
    ],
)
def test_the_time_is_proportional_to_the_length(pieces: list[str]) -> None:
    """It is 0.1 s. A text that is put together again for each part takes 5 s."""
    parser, began_s = HermesParser(), process_time()
    texts = [parser.feed(piece)[0] for piece in pieces]
    texts.append(parser.end()[0])
    assert process_time() - began_s < 1.5
    assert "".join(texts).rstrip() in ("".join(pieces), "".join(pieces[1:]).rstrip())


@pytest.mark.parametrize("arguments", ['{"a":123456789012345678901234567890}', '{"a":' * 300 + "1" + "}" * 300, '"é"'])
def test_arguments_are_as_the_model_wrote_them(arguments: str) -> None:
    wanted = json.loads(arguments) if arguments[0] == '"' else arguments
    assert read_calls(f'{{"name":"f","arguments":{arguments}}}') == [("f", wanted)]


@pytest.mark.parametrize("arguments", ["NaN", "1e999", '"\\ud800"', "[" * 100_000 + "]" * 100_000, "9" * 5000])
def test_what_no_client_can_read_is_no_call(arguments: str) -> None:
    assert read_calls(f'{{"name":"f","arguments":{arguments}}}') == []
