"""The long strings of a load are read in parts; the oracle is the standard library, which reads them whole."""

from __future__ import annotations

import base64
import json
import random
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.frontends.http import repository, structure
from headrace.frontends.http.long_strings import LongString, read_object

STRANGE = ["a", "bcd", '"', "\\", "/", "é", "\n", '\\"', "😀", "x" * 40]


def whole(document: dict[str, Any]) -> dict[str, Any]:
    given = document["parameters"]
    return {name: "".join(value.parts()) if isinstance(value, LongString) else value for name, value in given.items()}


@pytest.mark.parametrize("window", [16, 64, 100])
def test_strings_are_what_they_are_in_the_whole_document(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    monkeypatch.setattr(structure, "SLICE_BYTES", window)
    choice, cut = random.Random(window), 0
    for _ in range(300):
        texts = ["".join(choice.choices(STRANGE, k=choice.randint(0, 40))) for _ in range(choice.randint(0, 4))]
        given = {f"file:{number}": text for number, text in enumerate(texts)}
        document = {"before": '"', "parameters": given, "behind": ["\\"]}
        text = json.dumps(document, indent=choice.choice([None, 1]), ensure_ascii=choice.random() < 0.5).encode()
        read = read_object(memoryview(text))
        cut += sum(isinstance(value, LongString) for value in read["parameters"].values())
        assert whole(read) == given
    assert cut > 50


def test_what_is_damaged_is_refused_or_read_as_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("size", [0, 1, 2, 3, 4, 5, 60, 61, 62])
@pytest.mark.parametrize("step", [1, 2, 3, 4, 5, 7, 100])
def test_base64_in_parts_is_base64(size: int, step: int) -> None:
    data = bytes(range(size))
    text = base64.b64encode(data).decode()
    parts = [text[at : at + step] for at in range(0, len(text), step)]
    assert b"".join(repository._decode(parts)) == data


@pytest.mark.parametrize("parts", ["A==,=QUJD", "QQ==,QUJD", "QQ==QUJD", "Q", "QU,J", "Q?JD", "====", "QQ=,=="])
def test_what_is_no_base64_is_refused_however_it_is_cut(parts: str) -> None:
    with pytest.raises(ValueError, match=r"padding|base64|number of data"):
        b"".join(repository._decode(parts.split(",")))
