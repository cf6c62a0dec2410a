"""Templates of paths: the paths that they match, and pairs that one path may match. The oracle tries paths."""

from __future__ import annotations

from itertools import product

import pytest

from headrace_http.url_paths import INFER, LOAD, PathTemplate, read_path

_WORDS = ("a", "b", "7", "{name}", "{version}")


def matches(template: PathTemplate, path: str) -> bool:
    return template.pattern.fullmatch(path) is not None


@pytest.mark.parametrize(
    ("text", "path", "values"),
    [
        (INFER, "/v2/models/m/infer", {"name": "m", "version": None}),
        (INFER, "/v2/models/m/versions/12/infer", {"name": "m", "version": "12"}),
        (LOAD, "/v2/repository/models/m/load", {"repository": None, "name": "m"}),
        (LOAD, "/v2/repository/r/models/m%2F/load", {"repository": "r", "name": "m%2F"}),
    ],
)
def test_placeholders_have_their_values(text: str, path: str, values: dict[str, str | None]) -> None:
    found = read_path(text).pattern.fullmatch(path)
    assert found is not None
    assert found.groupdict() == values


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/m/versions/x/infer",
        "/v2/models/m/versions/infer",
        "/v2/models//infer",
        "/v2/models/a/b/infer",
        "/v2/models/m/infer/",
        "/v2/models/m/versions/\u0663/infer",
    ],
)
def test_a_placeholder_is_one_segment_and_a_version_has_digits(path: str) -> None:
    assert not matches(read_path(INFER), path)


def test_two_templates_overlap_if_a_path_matches_both() -> None:
    paths = ["/" + "/".join(words) for words in product(("a", "b", "7", "c", "12"), repeat=2)]
    templates = [f"/{one}/{two}" for one, two in product(_WORDS, repeat=2) if "{" not in one or one != two]
    for one, two in product(templates, repeat=2):
        first, second = read_path(one), read_path(two)
        both = any(matches(first, path) and matches(second, path) for path in paths)
        assert first.overlaps(second) is both, (one, two)


def test_a_part_that_may_be_missing_overlaps_in_both_forms() -> None:
    optional = read_path("/a[/b]/c")
    assert optional.overlaps(read_path("/a/c"))
    assert optional.overlaps(read_path("/a/b/c"))
    assert not optional.overlaps(read_path("/a/b"))
    assert optional.overlaps(read_path("/{name}/{version}/c")) is False
    assert optional.overlaps(read_path("/{name}/{other}/c"))


def test_a_slash_at_the_end_may_be_optional() -> None:
    found = read_path("/models[/]")
    assert [matches(found, path) for path in ("/models", "/models/", "/models//", "/models/a")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert not found.overlaps(read_path("/models/{name}"))
    assert found.overlaps(read_path("/models/"))


@pytest.mark.parametrize(
    "path", ["", "a", "a/b", "//", "/a//b", "/{", "/{a b}", "/a b", "/a?b", "/a[/b", "/a]/b[", "/a[[/b]]", "/é"]
)
def test_an_invalid_path_is_refused(path: str) -> None:
    with pytest.raises(TypeError, match="the path"):
        read_path(path)


def test_a_placeholder_stands_once() -> None:
    with pytest.raises(TypeError, match="has a placeholder twice"):
        read_path("/{a}/{a}")
