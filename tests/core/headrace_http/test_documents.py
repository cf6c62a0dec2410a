"""JSON documents: the parser beside the standard library's, types, and the reader that plugins have.

The texts are Triton's (docs/spec/behaviours.md section 1.3).
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import Code, HeadraceError, HttpCall, InvalidArgument
from headrace_http.documents import MAX_DEPTH, check_depth, member, parse, parse_object, read_value
from headrace_http.infer_request import decode

_NUMBERS = st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
_VALUES = st.none() | st.booleans() | _NUMBERS | st.text()
_DOCUMENTS = st.recursive(
    _VALUES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=20
)


@given(_DOCUMENTS, st.booleans())
def test_a_document_is_read_as_the_standard_library_reads_it(document: Any, is_ascii: bool) -> None:
    text = json.dumps(document, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert parse(memoryview(text)) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("NaN", math.nan),
        ("Inf", math.inf),
        ("-Inf", -math.inf),
        ("Infinity", math.inf),
        ("-Infinity", -math.inf),
        ('"Inf"', "Inf"),
        (r'["a\"Inf", Inf]', ['a"Inf', math.inf]),
    ],
)
def test_numbers_that_json_lacks_are_read_outside_strings(text: str, value: Any) -> None:
    found = parse(memoryview(text.encode()))
    assert found == value or (math.isnan(found) and math.isnan(value))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "The document is empty. at 0"),
        ("  ", "The document is empty. at 0"),
        ('{"a": tru}', "Invalid value. at 9"),
        ("[1,]", "Invalid value. at 3"),
        ('{"a":1,}', "Missing a name for object member. at 7"),
        ('{"a" 1}', "Missing a colon after a name of object member. at 5"),
        ("[1 2]", "Missing a comma or ']' after an array element. at 3"),
        ("1 2", "The document root must not be followed by other values. at 2"),
        ("1e999", "Number too big to be stored in double. at"),
        ("[" * 2000, "Invalid value. at 2000"),
        ("[1 NaN]", "at 3"),
    ],
)
def test_a_document_that_is_none_is_refused_with_the_position(text: str, words: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse(memoryview(text.encode()))
    assert refused.value.message.startswith("failed to parse the request JSON buffer: ")
    assert words in refused.value.message
    assert refused.value.code is Code.INTERNAL


def test_a_document_that_is_nested_too_deep_is_refused() -> None:
    check_depth(parse(memoryview(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)))
    with pytest.raises(InvalidArgument, match="nesting depth exceeds") as refused:
        check_depth(parse(memoryview(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))))
    assert refused.value.code is Code.INVALID_ARGUMENT
    with pytest.raises(InvalidArgument, match="nesting depth exceeds"):
        parse(memoryview(b"[" * 5000 + b"]" * 5000))


def test_an_object_may_be_empty_and_is_nothing_else() -> None:
    assert parse_object(memoryview(b"")) == {}
    assert parse_object(memoryview(b'{"a": [1]}')) == {"a": [1]}
    with pytest.raises(InvalidArgument, match=r"^attempt to access JSON non-object as object$"):
        parse_object(memoryview(b"[]"))


_OF_EACH = {"boolean": True, "unsigned-integer": 7, "string": "s", "array": [1], "object": {"a": 1}}
_KINDS: dict[str, Any] = {"boolean": bool, "unsigned-integer": int, "string": str, "array": list, "object": dict}


@pytest.mark.parametrize("kind", _OF_EACH)
@pytest.mark.parametrize("word", _OF_EACH)
def test_a_value_is_of_one_type(kind: str, word: str) -> None:
    value = _OF_EACH[word]
    if kind == word:
        assert read_value(value, _KINDS[kind], "m") is value
        return
    with pytest.raises(InvalidArgument) as refused:
        read_value(value, _KINDS[kind], "m")
    assert refused.value.message == f"Unable to parse 'm': attempt to access JSON non-{kind} as {kind}"
    assert refused.value.code is Code.INTERNAL


@pytest.mark.parametrize(
    ("value", "is_read"), [(0, True), (2**64 - 1, True), (2**64, False), (-1, False), (1.0, False)]
)
def test_an_integer_is_unsigned_and_has_64_bits(value: Any, is_read: bool) -> None:
    if is_read:
        assert HttpCall.read_value(value, int) == value
        return
    with pytest.raises(InvalidArgument, match=r"^attempt to access JSON non-unsigned-integer as unsigned-integer$"):
        HttpCall.read_value(value, int)


def test_a_string_can_be_sent_back() -> None:
    with pytest.raises(InvalidArgument, match=r"^Unable to parse 'id': half of a surrogate pair$"):
        HttpCall.read_member({"id": "\ud800"}, "id", str)


def test_a_member_that_is_missing_has_the_default_or_an_error() -> None:
    assert HttpCall.read_member({}, "size", int, 0) == 0
    assert HttpCall.read_member({"size": 3}, "size", int, 0) == 3
    text = "^Unable to parse 'size': attempt to access non-existing object member 'size'$"
    for read in (lambda: HttpCall.read_member({}, "size", int), lambda: member({}, "size")):
        with pytest.raises(InvalidArgument, match=text):
            read()
    with pytest.raises(InvalidArgument, match=r"^Unable to parse 'size': attempt to access JSON non-unsigned-integer"):
        HttpCall.read_member({"size": None}, "size", int, 0)


_GIVEN: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(
        ["sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "a", "triton_a", "binary_data_output"]
    ),
    st.sampled_from([0, 1, -1, 2**64, True, "s", "s" * 129, 1.5, None, [], {}]),
    max_size=4,
)


def _seen(request: Any) -> Any:
    sequence = (request.sequence_id, request.sequence_start, request.sequence_end)
    return (*sequence, request.priority, request.timeout_us, dict(request.parameters))


@given(_GIVEN)
def test_parameters_are_read_as_those_of_an_infer_request(parameters: dict[str, Any]) -> None:
    def of(read: Any) -> Any:
        try:
            return _seen(read())
        except HeadraceError as error:
            return error.message, error.code

    body = memoryview(json.dumps({"inputs": [], "parameters": parameters}).encode())
    expected = of(lambda: decode("m", "", body, body.nbytes, 1 << 20).request)
    assert of(lambda: HttpCall.read_parameters(parameters).request("m", {}, [], "", "")) == expected


def test_a_custom_parameter_may_have_a_name_with_a_meaning() -> None:
    assert HttpCall.read_parameter(7, "timeout") == 7
    assert HttpCall.read_parameter(2**63, "sequence_id") == float(2**63)
    with pytest.raises(InvalidArgument, match="starting with 'triton_' are reserved"):
        HttpCall.read_parameter(7, "triton_a")
    with pytest.raises(InvalidArgument, match="parameter 'a' has invalid type"):
        HttpCall.read_parameter([], "a")
