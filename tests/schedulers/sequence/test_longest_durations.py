"""Durations up to the largest number of their fields, as in Triton 2.51: requests are answered, none expires."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient

from headrace import Server

LONGEST = 2**64 - 1
TENSORS = """
input { name: "x" data_type: TYPE_FP32 dims: [2] }
output { name: "y" data_type: TYPE_FP32 dims: [2] }
"""
POLICY = f"default_timeout_microseconds: {LONGEST} allow_timeout_override: true"


@pytest.mark.parametrize(
    "batching",
    [
        f"dynamic_batching {{ preferred_batch_size: 1 max_queue_delay_microseconds: {LONGEST} }}",
        f"dynamic_batching {{ default_queue_policy {{ {POLICY} }} }}",
        f"dynamic_batching {{ default_queue_policy {{ {POLICY} timeout_action: DELAY }} }}",
        "dynamic_batching { priority_levels: 2 default_priority_level: 1 "
        f"priority_queue_policy {{ key: 1 value {{ {POLICY} }} }} }}",
        f"sequence_batching {{ max_sequence_idle_microseconds: {LONGEST} }}",
        f"sequence_batching {{ oldest {{ preferred_batch_size: 1 max_queue_delay_microseconds: {LONGEST} }} }}",
        f"sequence_batching {{ direct {{ max_queue_delay_microseconds: {LONGEST} }} }}",
    ],
)
def test_the_longest_duration_is_accepted(
    batching: str, write_model: Callable[..., Path], headrace_server: Callable[..., Server]
) -> None:
    write_model(f'name: "m" backend: "identity" max_batch_size: 1 {TENSORS} {batching}')
    port = headrace_server().options.http_port
    values = np.ones((1, 2), np.float32)
    x = httpclient.InferInput("x", [1, 2], "FP32")
    x.set_data_from_numpy(values)
    with httpclient.InferenceServerClient(f"127.0.0.1:{port}") as connection:
        for timeout in (None, LONGEST, 60_000_000):
            answer = connection.infer(
                "m",
                [x],
                sequence_id=3,
                sequence_start=timeout is None,
                sequence_end=timeout == 60_000_000,
                timeout=timeout,
            )
            np.testing.assert_array_equal(answer.as_numpy("y"), values)
        assert str(LONGEST) in str(connection.get_model_config("m"))
