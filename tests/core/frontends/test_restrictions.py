"""docs/spec/behaviours.md sections 1.2 and 2.2; docs/spec/security.md C23 and C28."""

from __future__ import annotations

import pytest

from headrace.config.options import Restriction
from headrace.frontends.restrictions import Restrictions

RULES = Restrictions({"inference": Restriction("Admin-Key", "s3cret"), "health": Restriction("h", "")})


@pytest.mark.parametrize("given", ["s3cret", b"s3cret"])
def test_right_value_opens(given: str | bytes) -> None:
    assert RULES.refusal("inference", lambda name: {"admin-key": given}.get(name)) is None


@pytest.mark.parametrize("given", ["", "S3cret", "s3cret ", "s3cre", "s3cret\0", b"\xff", "é"])
def test_any_other_value_is_refused_without_saying_the_right_one(given: str | bytes) -> None:
    refusal = RULES.refusal("inference", lambda name: {"admin-key": given}.get(name))
    assert refusal == "This API is restricted, expecting header 'Admin-Key'"


def test_missing_header_is_refused_even_if_the_value_is_empty() -> None:
    assert RULES.refusal("health", lambda name: None) is not None
    assert RULES.refusal("health", lambda name: "") is None


def test_other_categories_are_open() -> None:
    assert RULES.refusal("metadata", lambda name: None) is None
