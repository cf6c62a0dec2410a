"""Headers that become parameters: chosen by the operator's pattern, never under a name with a meaning.

That a server applies them is tested in ``headrace_grpc/test_infer.py`` and ``headrace_http/test_infer_request.py``.
"""

from __future__ import annotations

import pytest

from headrace.errors import InvalidArgument, OperatorError
from headrace.frontends.header_forwarding import HeaderForwarding


def test_the_pattern_is_found_anywhere_in_the_name_in_any_case() -> None:
    headers = [("x-user", "a"), ("X-USER-ID", "b"), ("y-user", "c"), ("x-other", "d")]
    assert HeaderForwarding("x-user").parameters(headers) == {"x-user": "a", "X-USER-ID": "b"}


def test_an_empty_pattern_forwards_nothing() -> None:
    assert not HeaderForwarding("")
    assert HeaderForwarding("").parameters([("priority", "1")]) == {}
    assert HeaderForwarding("x")


def test_a_malformed_pattern_is_refused() -> None:
    with pytest.raises(OperatorError, match="headers cannot be forwarded"):
        HeaderForwarding("(")


@pytest.mark.parametrize(
    "name",
    [
        *("sequence_id", "sequence_start", "Sequence_End", "PRIORITY", "timeout", "headers", "binary_data_output"),
        *("triton_enable_empty_final_response", "Triton_x"),
    ],
)
def test_no_header_is_forwarded_as_a_reserved_parameter(name: str) -> None:
    forwarding = HeaderForwarding(".")
    assert forwarding.parameters([("user", "a")]) == {"user": "a"}
    with pytest.raises(InvalidArgument) as refused:
        forwarding.parameters([("user", "a"), (name, "1")])
    assert refused.value.message == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
