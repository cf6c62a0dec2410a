"""The output of ``headrace explain`` for a response. ``tests/protocol/test_explain.py`` uses real servers."""

from __future__ import annotations

from typing import Any

from headrace_inspect.explain import picture

DOCUMENT: dict[str, Any] = {
    "name": "two", "version": "1", "scheduler": "direct", "instances": 1, "max_batch_size": 0,
    "preferred_batch_size": [], "max_queue_delay_us": 0, "waiting": 1, "in_flight": 1, "batches": [],
}  # fmt: skip


def test_each_resource_has_a_line_with_its_holders_and_waiters() -> None:
    licence = {"resource": "license", "device": None, "units": 1, "in_use": 1}
    memory = {"resource": "memory", "device": 0, "units": 4, "in_use": 2}
    document = DOCUMENT | {
        "resources": [
            licence | {"used_by": {"one_0_0": 1}, "wanted_by": {"two_0_0": 1}},
            memory | {"used_by": {"one_0_0": 2}, "wanted_by": {"two_0_0": 3}},
            memory | {"in_use": 0, "used_by": {}, "wanted_by": {}},
        ]
    }
    assert list(picture(document, 0)) == [
        "two version 1: scheduler direct, 1 instances",
        "1 requests wait now, 1 are waiting or being executed",
        "1 of 1 units of resource 'license' are in use by one_0_0 (1); wanted by two_0_0 (1)",
        "2 of 4 units of resource 'memory' on device 0 are in use by one_0_0 (2); wanted by two_0_0 (3)",
        "0 of 4 units of resource 'memory' on device 0 are in use",
        "no batch has run yet",
    ]
