"""A text in parts ends before its first stop string, wherever the parts end."""

from __future__ import annotations

from itertools import combinations

import pytest

from headrace_llm import StopStrings


@pytest.mark.parametrize(
    "stop", [(), ("c",), ("abc",), ("bcd", "cab"), ("abcabd",), ("ab", "abc"), ("dQ",), ("d", "cd")]
)
def test_every_division_of_a_text_ends_at_the_same_place(stop: tuple[str, ...]) -> None:
    text = "abcabd"
    ends = [text.find(each) for each in stop if each in text]
    expected = text[: min(ends)] if ends else text
    for count in range(len(text)):
        for places in combinations(range(1, len(text)), count):
            stops, found = StopStrings(stop), ""
            for begin, end in zip((0, *places), (*places, len(text)), strict=True):
                found += stops.feed(text[begin:end])
                assert expected.startswith(found)
                if stops.has_stopped:
                    break
            assert found + stops.rest() == expected
            assert stops.has_stopped == bool(ends)
