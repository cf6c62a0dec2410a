"""Large JSON is read in pieces; the oracle is the standard library, which reads it whole."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.errors import HeadraceError, InvalidArgument
from headrace_http import large_documents, structure
from headrace_http.large_documents import LongString, read_object, read_texts

STRANGE = ["a", '"', "\\", "[", "]", ",", "{", "}", " ", "é", "\n", '\\"', "😀"]
ESCAPED = ["a", "bcd", '"', "\\", "/", "é", "\n", '\\"', "😀", "x" * 40]


def leaves(nested: list[Any]) -> Iterator[Any]:
    for each in nested:
        if type(each) is list:
            yield from leaves(each)
        else:
            yield each


def in_pieces(text: bytes) -> list[Any]:
    """Return the leaves of the ``data`` of the first input."""
    data = large_documents.read_document(memoryview(text))["inputs"][0]["data"]
    return (
        [leaf for piece in data.read() for leaf in piece]
        if type(data) is large_documents.Pieces
        else list(leaves(data))
    )


def values(choice: random.Random, is_text: bool, depth: int = 0) -> list[Any]:
    return [
        values(choice, is_text, depth + 1) if depth < 4 and choice.random() < 0.3
        else "".join(choice.choices(STRANGE, k=choice.randint(0, 6))) if is_text
        else choice.choice([0, 1, -5, 1.5, 1e10, 12345])
        for _ in range(choice.randint(1, 12))
    ]  # fmt: skip


@pytest.mark.parametrize("window", [1, 3, 16, 33])
@pytest.mark.parametrize("is_text", [False, True])
def test_pieces_are_what_the_whole_is_and_damage_is_found(
    monkeypatch: pytest.MonkeyPatch, window: int, is_text: bool
) -> None:
    monkeypatch.setattr(structure, "SLICE_BYTES", window)
    monkeypatch.setattr(large_documents, "_SHORT_BYTES", 8)
    choice = random.Random(window)
    for _ in range(25 if window > 3 else 8):  # small windows cost the most
        data = values(choice, is_text)
        document = {"id": 'x["', "inputs": [{"name": 'a["', "data": data, "shape": [1] * choice.randint(0, 8)}]}
        text = json.dumps(document, indent=choice.choice([None, 1]), ensure_ascii=choice.random() < 0.5).encode()
        assert in_pieces(text) == list(leaves(data))
        damaged = bytearray(text)
        place = choice.randrange(len(damaged))
        damaged[place : place + choice.randint(0, 1)] = choice.choice([b"", b",", b"[", b"]", b'"', b"\\", b"1"])
        judge(bytes(damaged))


def judge(text: bytes) -> None:
    """Compare a document with the standard library's reading: the same value, or both refuse it."""
    try:
        expected = list(leaves(json.loads(text)["inputs"][0]["data"]))
    except (ValueError, LookupError, TypeError):
        with pytest.raises((HeadraceError, LookupError, TypeError)):
            in_pieces(text)
        return
    if b"[]" in b"".join(text.split()):
        return  # which are not read
    assert in_pieces(text) == expected


@pytest.mark.parametrize("text", ["a", "\\", '"', "é😀", "\n\x01", "😀"])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_a_long_string_is_read_in_parts(text: str, ascii_only: bool) -> None:
    long = (text * 400_000)[:400_000]
    for data in ([long], ["x", long, "y"], [["a", "b"], [long, "c"]], [long, long], ["a"] * 9000 + [long, "b,"]):
        body = json.dumps({"inputs": [{"data": data}]}, ensure_ascii=ascii_only).encode()
        assert in_pieces(body) == list(leaves(data))


@pytest.mark.parametrize("data", [[1] * 100, "x", ["y" * 300]])
def test_arrays_that_are_no_tensor_are_in_their_place(data: Any) -> None:
    """Documents of a chat are as deep as those of a tensor."""
    content = [{"type": "text", "text": "a" * 90_000, "more": [[1, 2], "b" * 300]}]
    entry = {"shape": [1] * 300, "parameters": {"x": ["c" * 300]}, "data": data}
    document = {"messages": [{"content": content, "tool_calls": [{"id": "d" * 300}]}], "inputs": [entry]}
    body = json.dumps(document).encode()
    read = large_documents.read_document(memoryview(body))
    if type(pieces := read["inputs"][0]["data"]) is large_documents.Pieces:
        read["inputs"][0]["data"] = [leaf for piece in pieces.read() for leaf in piece]
    assert read == document


@pytest.mark.parametrize(("body", "text"), [
    (b"[" * 300_000 + b"]" * 300_000, "JSON nesting depth exceeds maximum allowed limit (100)"),
    (b"[" * 250_000, "failed to parse the request JSON buffer: Invalid value. at 250000"),
    (b'{"x":[' + b"1," * 300_000 + b"1]}", "the JSON of the request has more than 65536 values besides tensors"),
    (b'{"id":"' + b"x" * 5_000_000 + b'","inputs":[{"data":[' + b"1," * 90_000 + b"1]}]}",
     "the JSON of the request has 5000030 bytes besides tensors, the most is 4194304"),
    (b'{"inputs":[{"data":[' + b"[]," * 30_000 + b"1]}]}",
     "the 'data' of an input has an empty array, which is not read in a request of this size"),
])  # fmt: skip
def test_large_value_of_an_unexpected_kind_is_refused(body: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        in_pieces(body)
    assert caught.value.message == text


# ------------------------------------------------------------------ the long strings of a load


def whole(document: dict[str, Any]) -> dict[str, Any]:
    parameters = document["parameters"]
    return {
        name: "".join(value.parts()) if isinstance(value, LongString) else value for name, value in parameters.items()
    }


@pytest.mark.parametrize("window", [16, 64, 100])
def test_strings_are_what_they_are_in_the_whole_document(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(structure, "SLICE_BYTES", window)
    choice, cut = random.Random(window), 0
    for _ in range(300):
        texts = ["".join(choice.choices(ESCAPED, k=choice.randint(0, 40))) for _ in range(choice.randint(0, 4))]
        parameters = {f"file:{number}": text for number, text in enumerate(texts)}
        document = {"before": '"', "parameters": parameters, "behind": ["\\"]}
        text = json.dumps(document, indent=choice.choice([None, 1]), ensure_ascii=choice.random() < 0.5).encode()
        read = read_object(memoryview(text))
        cut += sum(isinstance(value, LongString) for value in read["parameters"].values())
        assert whole(read) == parameters
    assert cut > 50


def test_damaged_document_is_refused_or_read_as_by_the_json_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "SLICE_BYTES", 70)
    choice = random.Random(1)
    text = json.dumps({"parameters": {"config": "{}", "file:1": "é/\\" * 90, "file:2": "=" * 300}}).encode()
    for _ in range(1000):
        damaged = bytearray(text)
        place = choice.randrange(len(damaged))
        damaged[place : place + choice.randint(0, 1)] = choice.choice([b"", b",", b"\n", b"}", b'"', b"\\", b"\xff"])
        try:
            expected: Any = json.loads(bytes(damaged))["parameters"]
        except (ValueError, KeyError):
            with pytest.raises((HeadraceError, KeyError)):
                whole(read_object(memoryview(bytes(damaged))))
        else:
            assert whole(read_object(memoryview(bytes(damaged)))) == expected


def test_a_name_of_a_place_is_not_taken_for_one() -> None:
    text = json.dumps({"parameters": {"file:1": "0", "file:2": "A" * 200_000}}).encode()
    assert whole(read_object(memoryview(text))) == {"file:1": "0", "file:2": "A" * 200_000}


@pytest.mark.parametrize("window", [16, 64, 100])
def test_long_texts_anywhere_are_what_they_are_in_the_whole_document(
    monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    monkeypatch.setattr(structure, "SLICE_BYTES", window)
    choice, found = random.Random(window), 0
    for _ in range(300):
        texts = ["".join(choice.choices(ESCAPED, k=choice.randint(0, 40))) for _ in range(choice.randint(1, 4))]
        document = {"a": texts, "b": [{"c": {"d": texts[0]}}, 1, None], "e": texts[-1]}
        text = json.dumps(document, indent=choice.choice([None, 1]), ensure_ascii=choice.random() < 0.5).encode()
        assert read_texts(memoryview(text)) == document
        found += len(large_documents._long_strings(memoryview(text)))
    assert found > 50


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"%b": 1}' % (b"x" * 200_000), "name is too long"),
        (b"[%b0]" % (b'"%b",' % (b"x" * 60_000) * 80), "besides long strings"),
        (b'["%b", %b0]' % (b"x" * 200_000, b"1," * 70_000), "65536 values"),
        (b'["%b", %b%b]' % (b"x" * 200_000, b"[" * 200, b"]" * 200), "depth"),
        (b'["%b' % (b"x" * 200_000), "failed to parse"),
        (b'["%b\\q"]' % (b"x" * 200_000), "failed to parse"),
        (b'["%b\xff"]' % (b"x" * 200_000), "failed to parse"),
    ],
    ids=["name", "strings", "values", "deep", "open", "escape", "no UTF-8"],
)
def test_texts_that_are_too_much_or_malformed_are_refused(body: bytes, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_texts(memoryview(body))
