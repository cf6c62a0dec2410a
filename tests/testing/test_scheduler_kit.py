"""The built-in schedulers pass the kit in every configuration."""

from __future__ import annotations

from headrace_testing import SchedulerConformance


class TestDirect(SchedulerConformance):
    plugin, scheduler = "headrace.builtins", "direct"


class TestDynamic(SchedulerConformance):
    plugin, scheduler = "headrace.builtins", "dynamic_batching"


class TestDynamicThatWaitsForFullerBatches(SchedulerConformance):
    plugin, scheduler = "headrace.builtins", "dynamic_batching"
    config = "dynamic_batching { preferred_batch_size: [4, 8] max_queue_delay_microseconds: 5000 }"
    delay_ns = 5_000_000


class TestDynamicWithTimeouts(SchedulerConformance):
    plugin, scheduler = "headrace.builtins", "dynamic_batching"
    config = """dynamic_batching { default_queue_policy {
        default_timeout_microseconds: 20000000000 allow_timeout_override: true
    } }"""
    timeout_us = 1500


class TestDynamicThatKeepsOrder(SchedulerConformance):
    plugin, scheduler = "headrace.builtins", "dynamic_batching"
    config = "dynamic_batching { preserve_ordering: true }"


class TestDynamicWithPriorities(SchedulerConformance):
    plugin, scheduler = "headrace.builtins", "dynamic_batching"
    config = "dynamic_batching { priority_levels: 3 default_priority_level: 2 }"
    levels = 3


class TestDynamicThatPostpones(SchedulerConformance):
    plugin, scheduler = "headrace.builtins", "dynamic_batching"
    config = """dynamic_batching { default_queue_policy {
        timeout_action: DELAY default_timeout_microseconds: 20000000000 allow_timeout_override: true
    } }"""
    timeout_us, postpones = 1500, True
