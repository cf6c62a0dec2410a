"""Rules of the whole model: its name, backend, versions, batching, response cache and metrics.

Source: docs/spec/behaviours.md sections 4.6 and 4.11.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from headrace.config.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelMetrics,
    ModelQueuePolicy,
    ModelVersionPolicy,
)
from headrace.config.validation.shared import Problem, check_preferred_sizes

#: The backends that accept certain platforms only. All other backends accept any platform.
_PLATFORMS = {
    "tensorrt": {"tensorrt_plan"},
    "tensorflow": {"tensorflow_graphdef", "tensorflow_savedmodel"},
    "onnxruntime": {"onnxruntime_onnx"},
    "pytorch": {"pytorch_libtorch", "torch_aoti"},
}


def check(config: ModelConfig, needs_backend: bool = True) -> Iterator[Problem]:
    """Check the name, platform and backend, ``max_batch_size`` and version policy."""
    if not config.name:
        yield Problem("name", "model configuration must specify 'name'")
    if needs_backend or config.backend or config.platform:
        yield from _check_backend(config)
    else:
        yield from _check_absent(config)
    if config.max_batch_size < 0:
        yield Problem("max_batch_size", f"'max_batch_size' must be non-negative value for {config.name}")
    yield from _check_versions(config.version_policy, config.name)


def check_batching(config: ModelConfig) -> Iterator[Problem]:
    """Check the preferred sizes, priorities and queue policies."""
    batching, model = config.dynamic_batching, config.name
    yield from check_preferred_sizes(
        "dynamic_batching.preferred_batch_size",
        "dynamic batching preferred size",
        batching.preferred_batch_size,
        config,
    )
    yield from _check_priorities(batching, model)
    if batching.preserve_ordering:
        yield from _check_ordering(batching, model)


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
    """Check ``preserve_ordering``: responses can only keep the order of requests if no request overtakes another."""
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
    """Yield the queue policies, each with its path."""
    yield "dynamic_batching.default_queue_policy", batching.default_queue_policy
    for level in sorted(batching.priority_queue_policy):
        yield f"dynamic_batching.priority_queue_policy[{level}]", batching.priority_queue_policy[level]


def check_ensemble(config: ModelConfig) -> Iterator[Problem]:
    """Check that an ensemble lists its models."""
    if config.platform == "ensemble" and not config.HasField("ensemble_scheduling"):
        yield Problem(
            "ensemble_scheduling",
            f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble",
        )


def check_caching(config: ModelConfig) -> Iterator[Problem]:
    """Check that a model with a response cache sends one response per request and has no sequences
    (docs/spec/behaviours.md sections 4.7 and 4.11)."""
    if not config.response_cache.enable:
        return
    prefix = f"Response Cache does not currently support model {config.name} with"
    if config.HasField("sequence_batching"):
        yield Problem(
            "response_cache.enable", f"{prefix} sequence batching scheduler. Please disable the response cache."
        )
    if config.model_transaction_policy.decoupled:
        yield Problem(
            "response_cache.enable", f"{prefix} 'decoupled' transaction policy. Please disable the response cache."
        )


def _check_backend(config: ModelConfig) -> Iterator[Problem]:
    is_ensemble = config.platform == "ensemble"
    if not config.backend and not is_ensemble:
        yield Problem("platform", f"unexpected platform type '{config.platform}' for {config.name}")
    elif config.backend and is_ensemble:
        yield Problem(
            "backend", f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend type"
        )
    elif config.platform not in _PLATFORMS.get(config.backend, {config.platform}):
        yield Problem("platform", f"unexpected 'platform' and 'backend' pair, got:{config.platform}, {config.backend}")


def _check_absent(config: ModelConfig) -> Iterator[Problem]:
    """Check that a model without a backend has no fields about instances."""
    for field in ("instance_group", "model_warmup"):
        if getattr(config, field):
            yield Problem(field, f"{field} should not be specified for model '{config.name}', which has no backend")


def _check_versions(policy: ModelVersionPolicy, model: str) -> Iterator[Problem]:
    field = "version_policy.specific.versions"
    choice = policy.WhichOneof("policy_choice")
    if choice is None:
        yield Problem("version_policy", f"must specify 'version policy' for {model}")
    elif choice == "specific":
        if not policy.specific.versions:
            yield Problem(field, f"version policy 'specific' lists no versions for {model}")
        for index, version in enumerate(policy.specific.versions):
            if version < 0:
                yield Problem(
                    f"{field}[{index}]",
                    f"version policy 'specific' lists version {version}, expected integers >= 0 for {model}",
                )


def check_metrics(config: ModelConfig) -> Iterator[Problem]:
    """Check that every ``metric_control`` is complete. The metric family need not exist."""
    for index, control in enumerate(config.model_metrics.metric_control):
        yield from _check_control(control, f"model_metrics.metric_control[{index}]", config.name)


def _check_control(control: ModelMetrics.MetricControl, field: str, model: str) -> Iterator[Problem]:
    family = control.metric_identifier.family
    if not control.HasField("metric_identifier"):
        yield Problem(f"{field}.metric_identifier", "metric control must specify 'metric_identifier'")
    elif not family:
        yield Problem(f"{field}.metric_identifier.family", "metric identifier must specify non-empty 'family'")
    if not control.HasField("histogram_options"):
        yield Problem(f"{field}.histogram_options", "metric control must specify 'histogram_options'")
        return
    field = f"{field}.histogram_options.buckets"
    buckets = control.histogram_options.buckets
    if not buckets:
        yield Problem(field, "histogram options must specify non-empty 'buckets'")
    elif not _is_increasing(buckets):
        yield Problem(field, f"histogram 'buckets' of metric family '{family}' must increase for {model}")


def _is_increasing(buckets: Sequence[float]) -> bool:
    """True if each bucket is larger than the one before. False if one is NaN."""
    return buckets[0] == buckets[0] and all(one < next_one for one, next_one in pairwise(buckets))
