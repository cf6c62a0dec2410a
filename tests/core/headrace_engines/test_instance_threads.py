"""The threads of an engine: as many as the cores, divided among the instances."""

from __future__ import annotations

import pytest
from google.protobuf import text_format

from headrace import ModelConfig
from headrace_engines import threads_beside_server, threads_per_instance


@pytest.mark.parametrize(
    ("groups", "cores", "expected"),
    [
        ("", 16, 8),
        ("instance_group { kind: KIND_CPU count: 4 }", 16, 4),
        ("instance_group { kind: KIND_CPU count: 32 }", 16, 1),
        ("instance_group { kind: KIND_CPU } instance_group { kind: KIND_CPU count: 2 }", 16, 4),
        ("instance_group { kind: KIND_CPU count: 2 } instance_group { kind: KIND_CPU count: 2 passive: true }", 16, 8),
        ("instance_group { kind: KIND_GPU count: 4 } instance_group { kind: KIND_CPU count: 1 }", 16, 16),
        ("", 1, 1),
    ],
)
def test_the_cores_are_divided_among_the_cpu_instances(
    monkeypatch: pytest.MonkeyPatch, groups: str, cores: int, expected: int
) -> None:
    monkeypatch.setattr("headrace_engines.instance_threads.available_cores", lambda: cores)
    assert threads_per_instance(text_format.Parse(groups, ModelConfig()), default_instances=2) == expected


@pytest.mark.parametrize(("count", "cores", "expected"), [(1, 16, 15), (1, 2, 1), (1, 1, 1), (2, 16, 8), (32, 16, 1)])
def test_a_single_instance_keeps_one_core_free_for_the_server(
    monkeypatch: pytest.MonkeyPatch, count: int, cores: int, expected: int
) -> None:
    monkeypatch.setattr("headrace_engines.instance_threads.available_cores", lambda: cores)
    config = text_format.Parse(f"instance_group {{ kind: KIND_CPU count: {count} }}", ModelConfig())
    assert threads_beside_server(config, default_instances=2) == expected
