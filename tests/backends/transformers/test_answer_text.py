"""From tokens to text: stop strings, wherever the parts are cut."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace_transformers.text_stream import TextStream

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
