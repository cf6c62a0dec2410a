"""The table of statuses against docs/spec/behaviours.md section 0, and details that a client accepts."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.errors import Code, HeadraceError, ResourceExhausted, Unavailable
from headrace.frontends.failures import without_paths
from headrace_grpc.status import STATUS, details, pushback_ms

#: grpc's numbers, as docs/spec/behaviours.md section 0 lists them.
NUMBERS = {
    "Unknown": 2,
    "Internal": 13,
    "Not found": 5,
    "Invalid argument": 3,
    "Unavailable": 14,
    "Unsupported": 12,
    "Already exists": 6,
    "Cancelled": 1,
    # https://grpc.github.io/grpc/core/md_doc_statuscodes.html
    "Unauthenticated": 16,
    "Permission denied": 7,
    "Resource exhausted": 8,
}


@pytest.mark.parametrize("code", Code)
def test_every_code_has_its_status(code: Code) -> None:
    assert STATUS[code] == NUMBERS[code.value]


@example("/proc" * 30)
@given(st.text(max_size=300).map(lambda text: text * 30) | st.text(st.characters(), max_size=50))
def test_details_fit_into_the_trailers_of_a_client(message: str) -> None:
    text = details(message)
    assert len(quote(text.encode(), safe="".join(map(chr, range(0x20, 0x7F))).replace("%", ""))) <= 6144 + 3
    whole = without_paths(message)  # without paths of this machine, which Hypothesis finds in the sources
    assert text == whole.encode("utf-8", "replace").decode() or text.endswith("...")


def test_a_long_plain_message_arrives_whole() -> None:
    assert details("x" * 6144) == "x" * 6144
    assert details("x" * 6145) == "x" * 6144 + "..."


def test_half_a_surrogate_pair_is_replaced() -> None:
    assert details("a\ud800b") == "a?b"


@pytest.mark.parametrize(
    ("retry_after_s", "expected"),
    [(0, 0), (0.0011, 2), (1.5, 1500), (-1, 0), (1e12, 2147483647), (None, None), (float("inf"), None)],
)
def test_when_to_try_again_is_told_in_whole_milliseconds(retry_after_s: float | None, expected: int | None) -> None:
    for kind in (Unavailable, ResourceExhausted):
        assert pushback_ms(kind("later", retry_after_s=retry_after_s)) == expected
    assert pushback_ms(HeadraceError("never")) is None
