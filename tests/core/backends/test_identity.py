"""The parameters and habits of Triton's sample backend of that name."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError
from headrace.plugins import Plugins
from headrace_http import text_format
from tests.core.conftest import IDENTITY, WriteModel

ISOLATED = IDENTITY + 'parameters { key: "isolation" value { string_value: "process" } }'
SAMPLE = {"identity": {"triton-sample": "true"}}


@pytest.mark.parametrize("text", [IDENTITY, ISOLATED])
def test_as_triton_s_sample_it_sends_parameters_and_counts_bytes(
    text: str, write_model: WriteModel, make_server: Callable[..., Any]
) -> None:
    write_model("m", text)
    with make_server(backend_config=SAMPLE) as server:
        answers = [server.infer("m", {"x": np.ones((2, 3), np.float32)}) for _ in range(2)]
        page = text_format.text(server.custom_metrics.collect())
    expected = {"param0": "an example string parameter", "param1": 42, "param2": False, "param3": 123.123}
    assert [dict(answer.parameters) for answer in answers] == [expected, expected]
    assert "# HELP input_byte_size_counter Cumulative input byte size of all requests received by the model" in page
    assert 'input_byte_size_counter{model="m",version="1"} 48' in page


def test_it_does_neither_by_default(write_model: WriteModel, make_server: Callable[..., Any]) -> None:
    write_model("m")
    with make_server() as server:
        assert dict(server.infer("m", {"x": np.ones((1, 1), np.float32)}).parameters) == {}


def test_a_creation_delay_holds_up_the_load(write_model: WriteModel, make_server: Callable[..., Any]) -> None:
    write_model("m", IDENTITY + 'parameters { key: "creation_delay_sec" value { string_value: "1" } }')
    begun = monotonic()
    with make_server() as server:
        assert server.index()[0].state == "READY"
        assert monotonic() - begun >= 1


def test_an_option_that_is_neither_true_nor_false_is_refused() -> None:
    identity = Plugins.discover(()).backends.get("identity")
    with pytest.raises(ConfigError, match="triton-sample of 'identity' is 'perhaps', expected true or false"):
        identity({"triton-sample": "perhaps"})
