from __future__ import annotations

import pytest
from google.protobuf import text_format

from headrace.config.model_config_pb2 import ModelConfig
from headrace.schedulers.dynamic import Priorities, QueuePolicy


@pytest.mark.parametrize(
    ("default_us", "override", "requested_us", "expected_us"),
    [(0, True, 50, 0), (100, False, 50, 100), (100, True, 50, 50), (100, True, 0, 100), (100, True, 200, 100)],
)
def test_a_request_may_only_shorten_a_timeout_that_is_set(
    default_us: int, override: bool, requested_us: int, expected_us: int
) -> None:
    policy = QueuePolicy(default_us * 1000, override)
    assert policy.timeout_ns(requested_us) == expected_us * 1000


def priorities(text: str) -> Priorities:
    return Priorities.from_config(text_format.Parse(f"dynamic_batching {{ {text} }}", ModelConfig()))


@pytest.mark.parametrize(("requested", "level"), [(0, 2), (1, 1), (3, 3), (4, 2)])
def test_priority_zero_or_beyond_the_levels_means_the_default_level(requested: int, level: int) -> None:
    assert priorities("priority_levels: 3 default_priority_level: 2").level(requested) == level


def test_each_level_has_its_own_policy_or_the_default() -> None:
    levels = priorities(
        "priority_levels: 2 default_priority_level: 1 default_queue_policy { max_queue_size: 5 } "
        "priority_queue_policy { key: 2 value { max_queue_size: 7 timeout_action: DELAY } }"
    )
    assert [levels.policy(level).max_size for level in (1, 2)] == [5, 7]
    assert [levels.policy(level).postpones for level in (1, 2)] == [False, True]


def test_there_may_be_as_many_levels_as_a_request_can_name() -> None:
    most = 2**64 - 1
    levels = priorities(
        f"priority_levels: {most} default_priority_level: {most} "
        f"priority_queue_policy {{ key: {most} value {{ max_queue_size: 7 }} }}"
    )
    assert (levels.level(0), levels.level(most - 1), levels.level(most)) == (most, most - 1, most)
    assert (levels.policy(most).max_size, levels.policy(1).max_size) == (7, 0)
