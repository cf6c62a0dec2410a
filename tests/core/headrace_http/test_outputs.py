"""The encoding of responses: what no JSON can carry is an error that names it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.errors import Code, HeadraceError
from headrace.messages.response import InferResponse
from headrace_http.outputs import BINARY, JSON, OutputFormat, encode


@pytest.mark.parametrize("default", [JSON, BINARY])
@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"fine": 1, "a": "\ud800"}, "'a'"),
        ({"a": 2**70}, "'a'"),
        ({"\ud800": 1}, r"'\ud800'"),
    ],
)
def test_a_response_parameter_that_json_can_not_carry_is_named(
    default: OutputFormat, parameters: dict[str, Any], named: str
) -> None:
    response = InferResponse({"y": np.ones(2, np.float32)}, parameters, model_name="m", model_version="1")
    with pytest.raises(HeadraceError) as refusal:
        encode(response, {}, default, {}, False)
    assert refusal.value.code is Code.INTERNAL
    assert refusal.value.message.startswith(f"response parameter {named} can not be sent: ")
