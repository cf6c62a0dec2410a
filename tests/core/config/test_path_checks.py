"""Names of files, judged by the name alone. The oracle is the normalised path."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.path_checks import one_line, why_path_leaves

_PARTS = st.lists(st.sampled_from(["a", "b", "..", ".", ""]), min_size=1, max_size=8)


@given(_PARTS, st.integers(0, 2))
def test_a_name_leaves_its_directory_if_any_prefix_does(parts: list[str], levels: int) -> None:
    name = "/".join(parts)
    if name.startswith("/"):
        assert why_path_leaves(name, levels) == "it is absolute"
        return
    heights = [posixpath.normpath("/".join(["d"] * 20 + parts[: end + 1])).count("/") for end in range(len(parts))]
    leaves = min(heights) < 19 - levels
    assert bool(why_path_leaves(name, levels)) is leaves


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a\0b", "it contains NUL"),
        ("a\\..\\b", "it contains a backslash"),
        ("/a", "it is absolute"),
        ("a/../..", "it climbs out with '..'"),
        ("", ""),
        ("a/..", ""),
        ("...", ""),
        ("a..b", ""),
    ],
)
def test_the_reason_is_returned(name: str, why: str) -> None:
    assert why_path_leaves(name) == why


@given(st.text())
def test_a_name_is_one_line_in_a_log(name: str) -> None:
    shown = one_line(name)
    assert len(shown.splitlines()) <= 1
    assert shown.isprintable()
    if name.isprintable():
        assert shown == name
