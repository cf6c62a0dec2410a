"""Sampling parameters and the other inputs of a request that are wrong: the error says what, and takes no time."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import BytesTensor, InferRequest, InvalidArgument
from headrace_llm import read_generation, read_sampling, sampling_of
from headrace_llm.sampling import SAMPLING_MEMBERS

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def refusal(read: Callable[[], object]) -> str:
    """Return the message of the `InvalidArgument` of ``read``, "" if there is none. No other exception is caught."""
    try:
        read()
    except InvalidArgument as error:
        return error.message
    return ""


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SAMPLING_MEMBERS)), VALUES)
def test_any_value_of_a_member_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    message = refusal(lambda: sampling_of({name: value}))
    known_as = {"stop_words": "stop", "max_completion_tokens": "max_tokens"}.get(name, name)
    assert known_as in (message or known_as)
    assert len(message) < 400
    assert "\n" not in message


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_taken_or_refused(text: bytes) -> None:
    message = refusal(lambda: read_sampling(text))
    assert not message or "sampling_parameters" in message or isinstance(orjson.loads(text), dict)


@pytest.mark.parametrize(
    ("member", "value", "rule"),
    [
        ("temperature", float("nan"), "temperature must be a number from 0 to 100, got nan"),
        ("temperature", 10**400, "temperature must be a number from 0 to 100, got 1000"),
        ("top_p", 10**9999, "top_p must be a number from 0 to 1, got a number of thousands of digits"),
        ("seed", 2**63, f"seed must be a whole number from {-(2**63)} to {2**63 - 1}, got {2**63}"),
        ("max_tokens", 0, "max_tokens must be a whole number from 1 to"),
        ("max_tokens", True, "max_tokens must be a whole number from 1 to .*, got True"),
        ("n", 10**9, "n must be a whole number from 1 to 1, got 1000000000"),
        ("stop", ["x"] * 10_000, "stop has 10000 strings, the limit is 16"),
        ("stop", [""], "stop must be a string or an array of strings, none empty"),
        ("stop", "\ud800", "stop has half of a surrogate pair at 0"),
        (
            "logit_bias",
            {str(number): 1 for number in range(10**6)},
            "logit_bias has 1000000 members, the limit is 1024",
        ),
        ("logit_bias", {"-1": 1}, "a token of logit_bias must be a whole number from 0"),
        ("structured_outputs", {"choice": []}, "structured_outputs.choice must be an array of strings, not empty"),
        ("structured_outputs", {"choice": ["x"] * 10**6}, "structured_outputs.choice has 1000000 strings, the limit"),
        ("structured_outputs", {"choice": ["a", 1]}, "a member of structured_outputs.choice must be a string, got 1"),
        ("structured_outputs", {"json": "no schema"}, "structured_outputs.json must be a JSON schema, got 'no schema'"),
        ("structured_outputs", {"json": "[" * 10**5}, "structured_outputs.json must be a JSON schema, got '\\[\\["),
        ("structured_outputs", {"json": '{"a":' * 90 + "1" + "}" * 90}, "is nested 90 levels deep, the limit is 64"),
        ("structured_outputs", {"regex": "a", "grammar": "b"}, "must have one constraint, got regex, grammar"),
        ("lora_name", 7, "lora_name must be a string, got 7"),
    ],
    ids=itertools.count(),
)
def test_a_wrong_member_is_refused_with_its_value_and_the_rule(member: str, value: Any, rule: str) -> None:
    begun = thread_time()
    with pytest.raises(InvalidArgument, match=rule) as refused:
        sampling_of({member: value})
    assert len(refused.value.message) < 300
    assert thread_time() - begun < 1


def test_what_contradicts_itself_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="min_tokens must be at most max_tokens, 3, got 4"):
        sampling_of({"min_tokens": 4, "max_tokens": 3})


def test_a_schema_may_be_a_string_of_json() -> None:
    assert sampling_of({"structured_outputs": {"json": '{"type": "object"}'}}).structured["json"] == {"type": "object"}


@pytest.mark.parametrize(
    "text", [b"[" * 10**5, b'{"stop": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", b'{"stop": "\\ud800"}']
)
def test_json_that_no_parser_takes_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidArgument, match="sampling_parameters is not JSON"):
        read_sampling(text)


def test_sampling_parameters_have_a_limit() -> None:
    with pytest.raises(InvalidArgument, match="sampling_parameters has 1048577 bytes, the limit is 1048576"):
        read_sampling(b" " * (2**20 + 1))


# ---------------------------------------------------------------------- the other inputs


def strings(*items: bytes) -> BytesTensor:
    return BytesTensor.from_items(items, (len(items),))


HELLO = {"text_input": strings(b"hello")}
NAMED = b'{"type": "function", "function": {"name": "f"}}'


@pytest.mark.parametrize(
    ("inputs", "rule"),
    [
        ({}, "a prompt is one of text_input, input_ids and messages, and not empty; got none of them"),
        ({"text_input": strings(b"")}, "got none of them"),
        ({"messages": strings(b"[]")}, "got none of them"),
        ({"input_ids": np.array([], np.int32)}, "got none of them"),
        ({**HELLO, "input_ids": np.array([1], np.int32)}, "got text_input and input_ids"),
        ({"text_input": strings(b"a", b"b")}, "input 'text_input' must be one string, got 2"),
        ({"text_input": np.array([1.0])}, "input 'text_input' must be of type BYTES"),
        ({"text_input": strings(b"ab\xff")}, "input 'text_input' is not UTF-8: byte 2 is 0xff"),
        ({"input_ids": np.array([1.5])}, "input 'input_ids' must be whole numbers"),
        ({"input_ids": np.array([3, -7], np.int32)}, "input 'input_ids' has the token -7"),
        ({"input_ids": np.zeros(2**20 + 1, np.int32)}, "input 'input_ids' has 1048577 tokens, the limit is 1048576"),
        ({"messages": strings(b"{}")}, "input 'messages' must be a JSON array, got {}"),
        ({"messages": strings(b'["hello"]')}, "a member of messages must be a JSON object, got 'hello'"),
        *(({"messages": strings(text)}, "a member of messages") for text in (b"[0]", b'[""]', b"[null]", b"[[]]")),
        ({"messages": strings(b"[" * 10**5)}, "input 'messages' is not JSON"),
        ({"messages": strings(b'[{"role": "\\ud800"}]')}, "input 'messages' is not JSON"),
        ({"messages": strings(b"[%b]" % (b"[" * 90 + b"]" * 90))}, "is nested 91 levels deep, the limit is 64"),
        ({"messages": strings(b"[" + b"{}," * 3_000_000 + b"{}]")}, "has 6000002 commas and brackets, the limit is"),
        ({"messages": strings(b"[" + b"{}," * 5000 + b"{}]")}, "messages has 5001 members, the limit is 4096"),
        ({**HELLO, "tools": strings(b"[1]")}, "a member of tools must be a JSON object, got 1"),
        ({**HELLO, "tool_choice": strings(b"auto")}, "input 'tool_choice' is not JSON"),
        ({**HELLO, "tool_choice": strings(b'"any"')}, "tool_choice must be one of auto, none, required, or a function"),
        ({**HELLO, "tool_choice": strings(b'{"function": 1}')}, "tool_choice must be one of auto, none, required, or"),
        ({**HELLO, "tool_choice": strings(b'"required"')}, "tool_choice is 'required', and there are no tools"),
        ({**HELLO, "tool_choice": strings(NAMED)}, "tool_choice names the tool 'f', which is none of tools"),
        ({**HELLO, "tools": strings(b'[{"function": {"name": "g"}}, {"function": 1}, {}]'),
          "tool_choice": strings(NAMED)}, "tool_choice names the tool 'f', which is none of tools"),
        ({**HELLO, "stream": np.array([True, False])}, "input 'stream' must be one boolean"),
        ({**HELLO, "image": strings(*[b"x"] * 65)}, "input 'image' has 65 images, the limit is 64"),
        ({"input_ids": np.array([1], np.int32), "image": strings(b"x")}, "the input image goes with text_input"),
        ({**HELLO, "stream": np.array([True]), "exclude_input_in_output": np.array([False])}, "is not allowed"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_a_wrong_input_is_refused_by_name(inputs: dict[str, Any], rule: str) -> None:
    with pytest.raises(InvalidArgument, match=rule) as refused:
        read_generation(InferRequest("m", inputs))
    assert len(refused.value.message) < 300


def test_a_prompt_of_10_mb_of_control_characters_is_a_prompt() -> None:
    text = b"\x00\x07" * 5_000_000
    assert read_generation(InferRequest("m", {"text_input": strings(text)})).text == text.decode()


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(["messages", "tools", "tool_choice"]), VALUES | st.binary(max_size=20))
def test_any_json_is_taken_or_refused(name: str, value: Any) -> None:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    inputs = {**({} if name == "messages" else HELLO), name: strings(text)}
    message = refusal(lambda: read_generation(InferRequest("m", inputs)))
    assert not message or re.search(rf"{name}|a prompt is", message)
