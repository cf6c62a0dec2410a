"""Patterns of headers: RE2's syntax, as Triton's command line accepts it, and linear time."""

from __future__ import annotations

import pytest

from headrace.config.options import header_pattern


@pytest.mark.parametrize(
    ("pattern", "matching", "not_found"),
    [
        ("^x-", ["x-a", "X-A"], ["ax-"]),
        ("tenant", ["x-tenant", "X-TENANT-ID"], ["x-ten"]),
        ("(?-i)^X-", ["X-a"], ["x-a"]),
        ("(?-i:X)-a", ["X-A"], ["x-a"]),
        (r"^\pL+$", ["abc"], ["a1"]),
        (r"(?P<kind>trace|span)-id", ["Trace-Id"], ["other-id"]),
        (r"\Ax\z", ["X"], ["xx"]),
    ],
)
def test_the_pattern_is_re2s_and_ignores_case_by_default(
    pattern: str, matching: list[str], not_found: list[str]
) -> None:
    find = header_pattern(pattern)
    assert all(map(find, matching))
    assert not any(map(find, not_found))


@pytest.mark.parametrize("pattern", ["(", "a**", "(?=x)", r"(x)\1", "(?<!x)y", "[z-a]"])
def test_pattern_that_re2_lacks_is_refused_by_name(pattern: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"invalid regular expression .* \(RE2\): \S") as caught:
        header_pattern(pattern)
    assert f"'{pattern}'" in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_no_name_of_a_header_takes_longer_than_its_length() -> None:
    """A backtracking engine would not finish in any practical time."""
    assert not header_pattern("^(x+x+)+y$")("x" * 60_000)
