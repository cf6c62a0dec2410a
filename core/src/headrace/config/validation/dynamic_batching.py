"""Rules of ``dynamic_batching`` (docs/spec/behaviours.md section 4.6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.config.model_config_pb2 import ModelConfig, ModelDynamicBatching, ModelQueuePolicy
from headrace.config.validation.shared import Problem, check_duration


def check(config: ModelConfig) -> Iterator[Problem]:
    """Preferred sizes, delay, priorities and queue policies."""
    batching, model = config.dynamic_batching, config.name
    yield from check_preferred_sizes(
        "dynamic_batching.preferred_batch_size",
        "dynamic batching preferred size",
        batching.preferred_batch_size,
        config,
    )
    field = "dynamic_batching.max_queue_delay_microseconds"
    yield from check_duration(field, batching.max_queue_delay_microseconds, f" for {model}")
    yield from _check_priorities(batching, model)
    for field, policy in _policies(batching):
        yield from check_duration(
            f"{field}.default_timeout_microseconds", policy.default_timeout_microseconds, f" for {model}"
        )
    if batching.preserve_ordering:
        yield from _check_ordering(batching, model)


def check_preferred_sizes(field: str, title: str, sizes: Sequence[int], config: ModelConfig) -> Iterator[Problem]:
    """Each preferred size must be one that a batch can have; ``title`` begins the message."""
    for index, size in enumerate(sizes):
        if size <= 0:
            yield Problem(f"{field}[{index}]", f"{title} must be positive for {config.name}")
        elif size > config.max_batch_size:
            yield Problem(f"{field}[{index}]", f"{title} must be <= max batch size for {config.name}")


def _check_priorities(batching: ModelDynamicBatching, model: str) -> Iterator[Problem]:
    levels = batching.priority_levels
    if levels == 0:
        return
    if not 1 <= batching.default_priority_level <= levels:
        yield Problem(
            "dynamic_batching.default_priority_level",
            f"default priority level must be in range [1, {levels}] for {model}",
        )
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            yield Problem(
                f"dynamic_batching.priority_queue_policy[{level}]",
                f"priority queue policy must have priority level in range [1, {levels}] for {model}",
            )


def _check_ordering(batching: ModelDynamicBatching, model: str) -> Iterator[Problem]:
    """Responses can leave in the order of the requests only if requests never overtake each other."""
    if batching.priority_levels > 1:
        yield Problem(
            "dynamic_batching.priority_levels",
            f"Only one priority level is allowed when 'preserve_ordering' is true for {model}",
        )
    for field, policy in _policies(batching):
        if policy.default_timeout_microseconds and policy.timeout_action == ModelQueuePolicy.DELAY:
            yield Problem(
                f"{field}.timeout_action",
                f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {model}",
            )


def _policies(batching: ModelDynamicBatching) -> Iterator[tuple[str, ModelQueuePolicy]]:
    """The queue policies, each with its path."""
    yield "dynamic_batching.default_queue_policy", batching.default_queue_policy
    for level in sorted(batching.priority_queue_policy):
        yield f"dynamic_batching.priority_queue_policy[{level}]", batching.priority_queue_policy[level]
