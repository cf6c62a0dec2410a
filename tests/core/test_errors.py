"""Errors as plugins make them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.errors import Code, HeadraceError, ResourceExhausted, Unauthenticated
from headrace_http.message import error_reply


@pytest.mark.parametrize(
    ("retry_after_s", "header"),
    [
        (math.inf, None),
        (-math.inf, None),
        (math.nan, None),
        (None, None),
        (1.2, b"2"),
        (-1, b"0"),
        (1e300, b"2147483647"),
    ],
)
def test_any_time_to_wait_has_an_answer(retry_after_s: Any, header: bytes | None) -> None:
    reply = error_reply(ResourceExhausted("r", retry_after_s=retry_after_s))
    assert reply.status == 429
    assert dict(reply.headers).get(b"Retry-After") == header


def test_unknown_attribute_of_an_error_is_refused_at_its_creation() -> None:
    with pytest.raises(TypeError, match="must be real number"):
        ResourceExhausted("r", retry_after_s="soon")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the code of an error is 404, which is no Code"):
        HeadraceError("r", 404)  # type: ignore[arg-type]


def test_texts_of_other_types_are_printed() -> None:
    assert b'"{7}"' in b"".join(error_reply(HeadraceError({7})).parts)  # type: ignore[arg-type]
    assert dict(error_reply(Unauthenticated("u", challenge=7)).headers)[b"WWW-Authenticate"] == b"7"  # type: ignore[arg-type]

    class Own(HeadraceError):
        code = Code.NOT_FOUND

        def __init__(self) -> None: ...

    assert error_reply(Own()).status == 404
